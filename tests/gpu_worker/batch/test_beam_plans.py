"""What plans may not say of beams."""

from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.messages.outputs import StepResult
from shared.messages.plans import Admission, BeamStep
from tests.gpu_worker.beam_search import beam_sampling
from tests.gpu_worker.planner import ints, sampling, step_plan
from tests.support.models import VOCAB_SIZE


def admission(**changes: Any) -> Admission:
    values: dict[str, Any] = {
        "handle": 1,
        "choice": 0,
        "tokens": ints(5, 6, 7),
        "num_prompt_tokens": 3,
        "num_computed": 0,
        "block_table": ints(0),
        "sampling": beam_sampling(2, max_tokens=3),
    }
    return Admission(**{**values, **changes})


def beam_step(**changes: Any) -> BeamStep:
    values: dict[str, Any] = {
        "group": 1,
        "handles": ints(1),
        "scores": np.zeros(len(changes.get("handles", [1])), np.float32),
        "parents": ints(),
        "tokens": ints(),
    }
    return BeamStep(**{**values, **changes})


def chunks(**sizes: int) -> dict[str, Any]:
    return {
        "chunk_handles": ints(*(int(name[1:]) for name in sizes)),
        "chunk_tokens": ints(*sizes.values()),
    }


def going(*steps: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return {"beams": tuple(beam_step(**step) for step in steps), **chunks(**sizes)}


ONE = {"parents": ints(1), "tokens": ints(8)}
TWO = {"handles": ints(1, 2), "parents": ints(1, 1), "tokens": ints(8, 9)}
BROKEN = {"scores": np.array([np.nan], np.float32)}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (going({**ONE, "handles": ints(9), "parents": ints(9)}, s1=1), "beam 9 is unknown"),
        (going({**ONE, "parents": ints(9)}, s1=1), "beam 9 is unknown"),
        (going(ONE, {**ONE, "group": 2}, s1=1), "group or a beam twice"),
        (going(ONE, {"handles": ints(7)}, s1=1), "group or a beam twice"),
        (going({**TWO, "handles": ints(1, 1)}, s1=1), "group or a beam twice"),
        (going({**TWO, "handles": ints(1, 4)}, s1=1, s4=1), "4 cannot be new: it is here"),
        (going({**ONE, "handles": ints(4), "parents": ints(4)}, s4=1), r"\[4\] are no beams"),
        (going({"handles": ints(4)}, s4=1), r"\[4\] are no beams"),
        (going(ONE), r"beams \[1\] do not compute their last tokens"),
        (going(TWO, s1=1), r"beams \[2\] do not compute their last tokens"),
        (going({}), r"beams \[1\] do not compute their last tokens"),
        (going({"handles": ints(3)}, s3=2), r"beams \[3\] do not compute their last tokens"),
        (going({}, s1=1), "no tokens or blocks up to 4"),
        (going(s3=3), r"beams \[3\] compute their last tokens, but are in no group"),
        (going(ONE, s1=1, s3=3), r"beams \[3\] compute their last tokens, but are in no group"),
        (going({**ONE, "handles": ints(3), "parents": ints(3)}, s3=3), "before they are computed"),
        (going({**ONE, "tokens": ints(VOCAB_SIZE)}, s1=1), "outside the vocabulary"),
        (going({**ONE, "tokens": ints(-1)}, s1=1), "outside the vocabulary"),
        (going({**ONE, "tokens": ints()}, s1=1), r"1 beams with \(1, 1, 0\) scores"),
        (going({**ONE, "parents": ints()}, s1=1), r"1 beams with \(1, 0, 1\) scores"),
        (going({**TWO, "parents": ints(1)}, s1=1, s2=1), r"2 beams with \(2, 1, 2\) scores"),
        (going({**ONE, "scores": np.zeros(2, np.float32)}, s1=1), r"1 beams with \(2, 1, 1\)"),
        (going({"handles": ints()}), r"0 beams with \(0, 0, 0\) scores"),
        (going({**ONE, **BROKEN}, s1=1), r"scores \[nan\] are no log-probabilities"),
        (
            going(
                {
                    "handles": ints(1, 2, 5),
                    "parents": ints(1, 1, 1),
                    "tokens": ints(8, 8, 8),
                },
                s1=1,
                s2=1,
                s5=1,
            ),
            "3 beams, but 2 is wide",
        ),
        (
            {"fork_parents": ints(1), "fork_children": ints(7), "fork_choices": ints(1)},
            "do not sample",
        ),
        ({**going(ONE, s1=1), "retired": ints(1)}, "beam 1 is unknown"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    executor: Executor, fields: dict[str, Any], why: str
) -> None:
    """Beam 1 is computed; 3 is another group's, and waits; 4 is no beam, and waits."""
    start(executor)
    with pytest.raises(PlanRefused, match=why):
        executor.execute(step_plan(2, **fields))


def test_the_plans_that_differ_little_from_those_are_carried_out(executor: Executor) -> None:
    for fields in (going(ONE, s1=1), going(TWO, s1=1, s2=1), going({"handles": ints(3)}, s3=3)):
        start(executor)
        assert len(executor.execute(step_plan(2, **fields)).beams) == 1


def start(executor: Executor) -> StepResult:
    executor.reset()
    new = (
        admission(),
        admission(handle=3, block_table=ints(3)),
        admission(handle=4, block_table=ints(4), sampling=sampling()),
    )
    return executor.execute(step_plan(1, admissions=new, **going({}, s1=3)))


def test_a_beam_without_room_is_refused(executor: Executor) -> None:
    tokens = np.arange(5, 13, dtype=np.int32)
    new = admission(tokens=tokens, num_prompt_tokens=8)
    executor.execute(step_plan(1, admissions=(new,), **going({}, s1=8)))
    with pytest.raises(PlanRefused, match="no tokens or blocks up to 9"):
        executor.execute(step_plan(2, **going(ONE, s1=1)))


def test_a_beam_cannot_go_on_beyond_its_last_token(executor: Executor) -> None:
    start(executor)
    executor.execute(step_plan(2, **going(ONE, s1=1)))
    result = executor.execute(step_plan(3, **going(ONE, s1=1)))
    assert set(result.beams[0].flags.tolist()) == {EndFlag.LENGTH}
    with pytest.raises(PlanRefused, match=r"beams \[1\] are continued, but the next token is"):
        executor.execute(step_plan(4, **going(ONE, s1=1)))


def test_a_child_of_a_fork_cannot_have_a_chunk(executor: Executor) -> None:
    start(executor)
    fields = {"fork_parents": ints(4), "fork_children": ints(7), "fork_choices": ints(1)}
    with pytest.raises(PlanRefused, match="7 is forked"):
        executor.execute(step_plan(2, **fields, **chunks(s4=3, s7=3)))
