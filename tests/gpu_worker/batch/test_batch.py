"""Plans as differences: what is implied, what is masked, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.messages.plans import Admission
from tests.gpu_worker.conftest import MakeWorker, prompt
from tests.gpu_worker.planner import GREEDY, Planner, ints, sampling, step_plan
from tests.support.models import MAX_MODEL_LEN, VOCAB_SIZE, tiny_model


def greedy_output(executor: Executor, tokens: list[int], num_tokens: int) -> list[int]:
    """What an undisturbed sequence generates."""
    executor.reset()
    planner = Planner(executor)
    planner.admit(1, tokens)
    planner.step(s1=len(tokens))
    output = list(planner.run(1, num_tokens))
    executor.reset()
    return output


def admission(**changes: Any) -> Admission:
    values: dict[str, Any] = {
        "handle": 1,
        "choice": 0,
        "tokens": ints(5, 6, 7),
        "num_prompt_tokens": 3,
        "num_computed": 0,
        "block_table": ints(0),
        "sampling": GREEDY,
    }
    return Admission(**{**values, **changes})


def test_length_ends_at_max_tokens(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(10), sampling(max_tokens=3))
    planner.admit(2, prompt(10), sampling(max_tokens=1))
    result = planner.step(s1=10, s2=10)
    assert result.handles.tolist() == [1, 2]
    assert result.ended_rows.tolist() == [1]
    assert result.ended_flags.tolist() == [EndFlag.LENGTH]
    planner.step()
    result = planner.step()
    assert result.ended_flags.tolist() == [EndFlag.LENGTH]
    assert len(planner.known[1].output) == 3


def test_length_ends_at_the_context(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(MAX_MODEL_LEN - 2), sampling(max_tokens=100))
    planner.step(s1=MAX_MODEL_LEN - 2)
    planner.run(1, 100)
    assert planner.known[1].ended == EndFlag.LENGTH
    assert planner.known[1].num_tokens == MAX_MODEL_LEN


def test_a_stop_token_ends_and_is_part_of_the_output(executor: Executor) -> None:
    tokens = prompt(12)
    output = greedy_output(executor, tokens, 8)
    stop = output[5]
    planner = Planner(executor)
    planner.admit(1, tokens, sampling(stop_token_ids=(1, stop)))
    planner.admit(2, tokens, sampling())
    planner.step(s1=12, s2=12)
    found = planner.run(1, 20)
    assert found == output[: output.index(stop) + 1]
    assert planner.known[1].ended == EndFlag.STOP
    assert planner.run(2, 8)[:8] == output


def test_end_of_sequence_ends_unless_ignored(executor: Executor, tmp_path: Path) -> None:
    tokens = prompt(12)
    output = greedy_output(executor, tokens, 10)
    end = output[6]
    path = tiny_model("llama", tmp_path, eos_token_id=[1, end])
    settings = WorkerSettings(model=str(path), dtype="float32", num_blocks=16, num_threads=1)
    worker = build_worker(settings)
    assert worker.model.eos_token_ids == (1, end)
    planner = Planner(worker.executor)
    planner.admit(1, tokens, sampling(ignore_eos=False))
    planner.admit(2, tokens, sampling(ignore_eos=True))
    planner.admit(3, tokens, sampling(ignore_eos=True, stop_token_ids=(end,)))
    planner.step(s1=12, s2=12, s3=12)
    assert planner.run(2, 10) == output
    until_end = output[: output.index(end) + 1]
    for handle in (1, 3):
        assert planner.known[handle].output == until_end
        assert planner.known[handle].ended == EndFlag.STOP


def test_both_ends_at_once_are_a_stop(executor: Executor) -> None:
    first = greedy_output(executor, prompt(9), 1)[0]
    planner = Planner(executor)
    planner.admit(1, prompt(9), sampling(max_tokens=1, stop_token_ids=(first,)))
    assert planner.step(s1=9).ended_flags.tolist() == [EndFlag.STOP]


def test_before_min_tokens_no_end_can_be_drawn(executor: Executor) -> None:
    tokens = prompt(12)
    stop = greedy_output(executor, tokens, 1)[0]
    planner = Planner(executor)
    planner.admit(1, tokens, sampling(stop_token_ids=(stop,), min_tokens=4, max_tokens=9))
    planner.step(s1=12)
    found = planner.run(1, 9)
    assert stop not in found[:4]
    assert len(found) > 4 or planner.known[1].ended


def test_an_ended_sequence_is_masked_until_it_is_retired(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(8), sampling(max_tokens=1))
    planner.admit(2, prompt(8, 1))
    assert planner.step(s1=8, s2=8).handles.tolist() == [1, 2]
    # Plans that were made before the end was known still grow it, or even compute it.
    late = step_plan(
        2,
        grown_handles=ints(1, 2),
        grown_blocks=ints(60, 61),
        chunk_handles=ints(1),
        chunk_tokens=ints(1),
    )
    result = executor.execute(late)
    assert result.handles.tolist() == [2]
    assert result.num_batched_tokens == 1
    result = executor.execute(step_plan(3, retired=ints(1)))
    assert result.handles.tolist() == [2]
    assert len(executor.batch) == 1


def test_a_retired_sequence_decodes_no_more(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(8))
    planner.admit(2, prompt(8, 1))
    planner.step(s1=8, s2=8)
    assert planner.step().handles.tolist() == [1, 2]
    planner.retire(1)
    result = planner.step()
    assert (result.handles.tolist(), result.num_batched_tokens) == ([2], 1)


def test_a_plan_without_rows_still_has_a_result(executor: Executor) -> None:
    result = executor.execute(step_plan(7))
    assert (result.step, result.handles.tolist(), result.num_batched_tokens) == (7, [], 0)


def test_a_chunk_inside_the_prompt_samples_nothing(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(20))
    result = planner.step(s1=19)
    assert (result.handles.tolist(), result.num_batched_tokens) == ([], 19)
    assert planner.step(s1=1).handles.tolist() == [1]


def test_slots_are_added_and_reused(make_worker: MakeWorker) -> None:
    planner = Planner(make_worker("llama", block_size=8, num_blocks=512).executor)

    def admit(handles: range) -> None:
        for handle in handles:
            planner.admit(handle, prompt(2 + handle % 5, handle % 5))
        planner.step(**{f"s{handle}": 2 + handle % 5 for handle in handles})

    admit(range(50))
    for handle in range(20, 30):
        planner.retire(handle)
    admit(range(100, 300))
    planner.step()
    planner.step()
    outputs = {handle: known.output[:3] for handle, known in planner.known.items()}
    assert len(outputs) == 240
    for handle, output in outputs.items():
        assert output == outputs[handle % 5], f"sequence {handle}"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"retired": ints(9)}, "unknown sequence 9"),
        ({"grown_handles": ints(9), "grown_blocks": ints(1)}, "sequence 9 is unknown"),
        ({"grown_handles": ints(1), "grown_blocks": ints()}, "belong together"),
        ({"grown_handles": ints(1), "grown_blocks": ints(64)}, "no block 64"),
        ({"grown_handles": ints(1), "grown_blocks": ints(-1)}, "no block -1"),
        ({"grown_handles": ints(*[1] * 64), "grown_blocks": ints(*[2] * 64)}, "beyond"),
        ({"chunk_handles": ints(9), "chunk_tokens": ints(1)}, "sequence 9 is unknown"),
        ({"chunk_handles": ints(1), "chunk_tokens": ints(4)}, "no tokens or blocks up to 4"),
        ({"chunk_handles": ints(1), "chunk_tokens": ints(0)}, "no chunk of 0"),
        ({"chunk_handles": ints(1, 1), "chunk_tokens": ints(1, 1)}, "no chunk of 1"),
        ({"admissions": (admission(),)}, "here already"),
        ({"admissions": (admission(handle=2, num_computed=3),)}, "3 of 3 tokens computed"),
        ({"admissions": (admission(handle=2, tokens=ints(VOCAB_SIZE)),)}, "outside"),
        ({"admissions": (admission(handle=2, tokens=ints(-1)),)}, "outside"),
        ({"admissions": (admission(handle=2, tokens=ints()),)}, "0 of 0"),
        ({"admissions": (admission(handle=2, num_computed=-1),)}, "-1 of 3 tokens computed"),
        ({"admissions": (admission(handle=2, num_computed=1, block_table=ints()),)}, "not fit"),
        ({"admissions": (admission(handle=2, block_table=ints(64)),)}, "no block 64"),
        ({"admissions": (admission(handle=2, block_table=ints(*range(65))),)}, "more than"),
        ({"admissions": (admission(handle=2, tokens=ints(*[5] * MAX_MODEL_LEN)),)}, "no room"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    executor: Executor, fields: dict[str, Any], why: str
) -> None:
    executor.execute(step_plan(1, admissions=(admission(),)))
    with pytest.raises(PlanRefused, match=why):
        executor.execute(step_plan(2, **fields))


def test_a_sequence_that_decodes_without_a_block_is_refused(executor: Executor) -> None:
    tokens = np.arange(5, 13, dtype=np.int32)
    new = admission(tokens=tokens, num_prompt_tokens=8)
    executor.execute(step_plan(1, admissions=(new,), chunk_handles=ints(1), chunk_tokens=ints(8)))
    with pytest.raises(PlanRefused, match="no room in its blocks"):
        executor.execute(step_plan(2))


def test_a_decoding_sequence_cannot_have_a_chunk(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(3))
    planner.step(s1=3)
    with pytest.raises(PlanRefused, match="no chunk"):
        executor.execute(step_plan(2, chunk_handles=ints(1), chunk_tokens=ints(1)))
