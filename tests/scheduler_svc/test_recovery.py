"""Reading unfinished requests back from the outputs log."""

from dataclasses import replace

import numpy as np

from scheduler_svc.epoch import replay_until
from scheduler_svc.recovery import Recovery
from shared.bus.api import Append, EntryId
from shared.bus.memory import MemoryBus
from shared.codec import Message, encode
from shared.messages.endings import EndFlag
from shared.messages.outputs import ChoiceEnded, ChoiceState, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted
from tests.support.outputs_log import recovered
from tests.support.requests import submit


def state(request_id: str, handle: int, output: list[int], cursor: str = "0-0") -> RequestState:
    choice = ChoiceState(0, handle, np.array(output, np.int32), finish_reason="")
    return RequestState(submit(request_id), (choice,), cursor)


def result(step: int, tokens: dict[int, int], ended: list[int] | None = None) -> StepResult:
    rows = [list(tokens).index(handle) for handle in ended or ()]
    return StepResult(
        step=step,
        handles=np.array(list(tokens), np.int32),
        tokens=np.array(list(tokens.values()), np.int32),
        ended_rows=np.array(rows, np.int32),
        ended_flags=np.full(len(rows), EndFlag.STOP, np.int32),
        beams=(),
        logprobs=(),
        prompt_logprobs=(),
        admitted_handles=np.empty(0, np.int32),
        admitted_computed=np.empty(0, np.int32),
        num_batched_tokens=len(tokens),
        model_us=0,
        step_us=0,
    )


def outputs(*messages: Message) -> dict[str, list[int]]:
    recovery = recovered(messages)
    return {found.submit.request_id: found.outputs()[0].tolist() for found in recovery.in_order()}


def later(state: RequestState, step: int) -> RequestState:
    """The same, with all results up to this step in it."""
    return replace(state, step=step)


STARTED = EpochStarted(5, "scheduler", ("worker",))
AGAIN = EpochStarted(6, "scheduler", ("worker",))


def test_tokens_of_results_follow_those_of_the_state() -> None:
    assert outputs(
        STARTED, state("a", 1, []), result(1, {1: 10}), state("b", 2, [7]), result(2, {1: 11, 2: 8})
    ) == {"a": [10, 11], "b": [7, 8]}


def test_a_new_epoch_may_give_an_old_handle_to_another_request() -> None:
    assert outputs(
        STARTED,
        state("a", 1, []),
        state("b", 2, []),
        result(1, {1: 10, 2: 20}),
        AGAIN,
        state("b", 1, [20]),
        state("a", 2, [10]),  # its old handle is b's now
        result(1, {1: 21, 2: 11}),
    ) == {"a": [10, 11], "b": [20, 21]}


def test_what_has_ended_is_not_found_again() -> None:
    assert (
        outputs(
            STARTED,
            state("a", 1, []),
            state("b", 2, []),
            result(1, {1: 10, 2: 20}, ended=[2]),
            RequestEnded("a", "abort", "", "0-0"),
        )
        == {}
    )


def test_a_state_replaces_what_was_known_and_retires_the_old_handle() -> None:
    assert outputs(
        STARTED,
        state("a", 1, []),
        result(1, {1: 10}),
        state("a", 4, [10]),
        result(2, {1: 99}),
        result(3, {4: 11}),
    ) == {"a": [10, 11]}


def test_handles_of_an_epoch_mean_nothing_in_the_next() -> None:
    assert outputs(STARTED, state("a", 1, [5]), AGAIN, result(1, {1: 99})) == {"a": [5]}


def test_a_repeated_step_is_dropped_and_behind_a_gap_nothing_is_joined() -> None:
    assert outputs(
        STARTED,
        state("a", 1, []),
        result(1, {1: 10}),
        result(1, {1: 10}),
        result(3, {1: 12}),
        result(4, {1: 13}),
    ) == {"a": [10]}


async def test_an_epoch_whose_start_is_lost_is_another_one_all_the_same() -> None:
    """Redis lost its EpochStarted with the end of the log, and its scheduler did not notice."""
    bus, log = MemoryBus(lambda: 5), "outputs"
    await bus.append(Append(log, [encode(STARTED)], 5))
    await bus.append(Append(log, [encode(state("a", 1, []))], 5))
    await bus.append(Append(log, [encode(result(1, {1: 10}))], 5))
    await bus.append(Append(log, [encode(state("a", 2, [10, 11, 12]))], 7))
    await bus.append(Append(log, [encode(result(1, {2: 13}))], 7))
    await bus.append(Append(log, [encode(result(2, {2: 14}))], 7))
    recovery = Recovery(max_model_len=100)
    await replay_until(bus, log, EntryId(8, 0), recovery)
    [found] = recovery.in_order()
    assert found.outputs()[0].tolist() == [10, 11, 12, 13, 14]


def test_a_log_whose_beginning_was_trimmed_starts_with_any_step() -> None:
    known = later(state("a", 1, [1, 2]), step=70)
    assert outputs(result(70, {9: 1}), known, result(71, {1: 3})) == {"a": [1, 2, 3]}


def test_the_first_result_behind_a_trimmed_beginning_joins_the_state_that_it_follows() -> None:
    known = later(state("a", 1, [1, 2]), step=69)
    assert outputs(known, result(70, {1: 3}), result(71, {1: 4})) == {"a": [1, 2, 3, 4]}


def test_a_missing_result_behind_the_first_remaining_state_is_detected() -> None:
    known = later(state("a", 1, [1, 2]), step=69)
    assert outputs(known, result(71, {1: 4}), result(72, {1: 5})) == {"a": [1, 2]}


def test_where_requests_has_lost_its_end_the_last_requests_cursor_counts() -> None:
    recovery = recovered([state("a", 1, [], "7-1"), state("b", 2, [], "3-0")])
    assert recovery.requests_cursor == EntryId(3, 0)


def test_the_furthest_requests_cursor_counts() -> None:
    ended = RequestEnded("x", "abort", "", "9-0")
    recovery = recovered([state("a", 1, [], "7-1"), ended, state("b", 2, [])])
    assert recovery.requests_cursor == EntryId(9, 0)


def test_choices_end_one_by_one() -> None:
    two = (
        ChoiceState(0, 1, np.array([5], np.int32), finish_reason=""),
        ChoiceState(1, 2, np.array([6], np.int32), finish_reason=""),
    )
    log: list[Message] = [
        STARTED,
        RequestState(submit("a", num_choices=2), two, "0-0"),
        result(1, {1: 10, 2: 20}, ended=[2]),
    ]
    [found] = recovered(log).in_order()
    assert {number: output.tolist() for number, output in found.outputs().items()} == {0: [5, 10]}
    assert found.ended[1].output.tolist() == [6, 20]
    assert found.ended[1].reason == "stop"
    assert recovered([*log, ChoiceEnded("a", 0, "stop", "0-0")]).in_order() == []
