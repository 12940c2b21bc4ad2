"""Requests whose texts follow a grammar: how plans carry it, what it counts, and how it fails."""

from dataclasses import replace

import numpy as np
import pytest

from shared.messages.endings import GRAMMAR_FAILED, EndFlag
from shared.messages.outputs import RequestEnded, RequestState, StepResult
from tests.support.logged_core import LoggedCore, attach
from tests.support.outputs_log import recovered
from tests.support.requests import submit

GRAMMAR = '{"grammars": []}'


def failed(result: StepResult, row: int) -> StepResult:
    """The result, in which the text of a row cannot go on."""
    return replace(
        result,
        ended_rows=np.array([row], np.int32),
        ended_flags=np.array([EndFlag.ERROR], np.int32),
    )


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_text_that_cannot_follow_its_grammar_ends_its_request(num_choices: int) -> None:
    engine = LoggedCore()
    engine.apply(submit("r", range(5), num_choices=num_choices, grammar=GRAMMAR))
    engine.apply(submit("other", range(6), max_tokens=3))
    engine.step()
    engine.plan()
    result = engine.worker.execute(engine.plans.popleft())
    [answer] = engine.apply(failed(result, result.handles.tolist().index(1)))
    assert isinstance(answer, RequestEnded)
    assert (answer.request_id, answer.reason, answer.error) == ("r", "error", GRAMMAR_FAILED)
    engine.run()
    assert engine.outputs("other").keys() == {0}
    [again] = engine.apply(attach(submit("r", range(5), num_choices=num_choices)))
    assert isinstance(again, RequestEnded)
    assert again.error == GRAMMAR_FAILED
    assert recovered(engine.log, 200).finished.find("r") is not None


def test_a_plan_has_the_grammar_of_a_request_once() -> None:
    engine = LoggedCore()
    engine.apply(submit("r", range(5), num_choices=3, grammar=GRAMMAR))
    engine.apply(submit("s", range(6), num_choices=2, grammar=GRAMMAR))
    engine.apply(submit("t", range(7), num_choices=2))
    engine.step(3)
    engine.start_epoch()
    engine.plan()
    plan = engine.plans[0]
    by_request: dict[int, list[tuple[str, int]]] = {}
    for new in plan.admissions:
        found = by_request.setdefault(new.num_prompt_tokens, [])
        found.append((new.sampling.grammar, new.grammar_of))
    first_r, first_s = plan.admissions[0].handle, plan.admissions[3].handle
    assert by_request == {
        5: [(GRAMMAR, 0), ("", first_r), ("", first_r)],
        6: [(GRAMMAR, 0), ("", first_s)],
        7: [("", 0), ("", 0)],
    }
    assert [new.has_grammar for new in plan.admissions] == [True] * 5 + [False] * 2


def test_a_grammar_counts_as_tokens_in_the_queue() -> None:
    engine = LoggedCore(max_waiting_tokens=100)
    [answer] = engine.apply(submit("a", range(5), grammar="x" * 380))
    assert isinstance(answer, RequestState)
    [answer] = engine.apply(submit("b", range(5)))
    assert isinstance(answer, RequestEnded)
    assert answer.error == "105 tokens would wait, at most 100 may"
