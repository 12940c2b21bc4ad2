"""The outputs log as the gateway reads it, without any I/O."""

from collections.abc import Sequence

import numpy as np
import pytest

from gateway.sessions import (
    ChoiceEnded,
    Event,
    PromptScored,
    RequestFailed,
    Sessions,
    TokensArrived,
)
from shared.bus.api import START, Entry, EntryId
from shared.codec import Message, encode
from shared.messages import (
    ChoiceState,
    EpochStarted,
    FinishReason,
    PromptLogprobs,
    RequestEnded,
    RequestState,
    StepResult,
    TokenLogprobs,
)
from tests.gateway.fake_engine import scores
from tests.support.requests import submit


class Log:
    """Writes entries and reads them at once."""

    def __init__(self, *requests: str, scored: bool = False) -> None:
        self.sessions = Sessions()
        self.epoch, self.seq, self.number = 1, 0, 0
        for request_id in requests:
            self.sessions.open(request_id, scored=scored)

    def say(self, *messages: Message) -> list[Event]:
        self.seq += 1
        data = tuple(encode(message) for message in messages)
        return self.sessions.apply(Entry(EntryId(self.epoch, self.seq), data))

    def start(self, epoch: int) -> list[Event]:
        self.epoch, self.seq, self.number = epoch, -1, 0
        return self.say(EpochStarted(epoch, "scheduler", ("worker",)))

    def state(
        self, request_id: str, handle: int, output: Sequence[int] = (), reason: str = ""
    ) -> list[Event]:
        choice = ChoiceState(handle, np.array(output, np.int32), reason)
        return self.say(RequestState(submit(request_id), (choice,), "3-4"))

    def step(
        self,
        tokens: dict[int, int],
        ended: dict[int, int] | None = None,
        number: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompts: tuple[PromptLogprobs, ...] = (),
    ) -> list[Event]:
        self.number = self.number + 1 if number is None else number
        ended = ended or {}
        rows = [list(tokens).index(handle) for handle in ended]
        return self.say(
            StepResult(
                step=self.number,
                handles=np.array(list(tokens), np.int32),
                tokens=np.array(list(tokens.values()), np.int32),
                ended_rows=np.array(rows, np.int32),
                ended_flags=np.array(list(ended.values()), np.int32),
                logprobs=logprobs,
                prompt_logprobs=prompts,
                num_batched_tokens=1,
                model_us=0,
                step_us=0,
            )
        )


def tokens(request_id: str, *ids: int) -> TokensArrived:
    return TokensArrived(request_id, 0, list(ids), ())


def assert_lost(events: Sequence[Event], *request_ids: str) -> None:
    assert {event.request_id for event in events} == set(request_ids)
    for event in events:
        assert isinstance(event, RequestFailed)
        assert not event.engine_knows


@pytest.fixture
def log() -> Log:
    log = Log("a", "b")
    log.start(5)
    return log


def test_tokens_go_to_the_requests_whose_handles_they_bear(log: Log) -> None:
    log.state("a", 1)
    log.state("b", 2)
    assert log.step({1: 10, 2: 20, 3: 30}) == [tokens("a", 10), tokens("b", 20)]


def test_a_flag_ends_a_choice_and_later_tokens_are_ignored(log: Log) -> None:
    log.state("a", 1)
    assert log.step({1: 10}, {1: 2}) == [
        tokens("a", 10),
        ChoiceEnded("a", 0, FinishReason.LENGTH),
    ]
    assert log.step({1: 11}) == []
    assert log.say(RequestEnded("a", "error", "too late", "0-0")) == []


def test_a_repeated_step_is_dropped(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert log.step({1: 10}, number=1) == []
    assert log.step({1: 11}, number=2) == [tokens("a", 11)]


def test_a_missing_step_loses_every_open_request(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert_lost(log.step({1: 12}, number=3), "a", "b")
    assert len(log.sessions) == 0


def test_a_request_that_did_not_start_yet_sees_no_gap_before_its_first_result() -> None:
    log = Log("a")
    log.state("a", 1)
    assert log.step({1: 10}, number=77) == [tokens("a", 10)]
    assert_lost(log.step({1: 11}, number=79), "a")


def test_a_new_epoch_counts_steps_anew_and_forgets_handles(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert log.start(6) == []
    assert log.state("a", 2, [10]) == []
    assert log.step({1: 99, 2: 11}) == [tokens("a", 11)]


def test_a_state_with_more_tokens_delivers_the_rest(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    log.start(6)
    assert log.state("a", 2, [10, 11, 12]) == [tokens("a", 11, 12)]
    assert log.step({2: 13}) == [tokens("a", 13)]


@pytest.mark.parametrize("output", [[], [10], [10, 99], [10, 99, 12], [99, 11]])
def test_a_state_with_fewer_or_other_tokens_loses_the_request(log: Log, output: list[int]) -> None:
    log.state("a", 1)
    log.step({1: 10})
    log.step({1: 11})
    log.start(6)
    assert_lost(log.state("a", 2, output), "a")


def test_a_state_retires_the_handle_before_it(log: Log) -> None:
    log.state("a", 1)
    log.state("a", 2)
    assert log.step({1: 10}) == []
    assert log.step({2: 11}) == [tokens("a", 11)]


def test_a_state_under_the_same_handle_changes_nothing(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert log.state("a", 1, [10]) == []
    assert log.step({1: 11}) == [tokens("a", 11)]


def test_a_state_that_ended_ends_the_choice(log: Log) -> None:
    assert log.state("a", 1, [10], "stop") == [
        tokens("a", 10),
        ChoiceEnded("a", 0, FinishReason.STOP),
    ]


def test_tokens_without_their_logprobs_are_not_what_was_asked_for() -> None:
    log = Log("a", scored=True)
    log.start(5)
    log.state("a", 1)
    log.start(6)
    assert_lost(log.state("a", 2, [10]), "a")


def test_logprobs_go_with_their_tokens() -> None:
    log = Log("a", scored=True)
    log.start(5)
    log.state("a", 1)
    found = scores(10, -0.5, {10: -0.5}, row=1)
    prompt = PromptLogprobs(1, (scores(7, -1.0, {7: -1.0}, row=1),))
    events = log.step({9: 8, 1: 10}, logprobs=(found,), prompts=(prompt,))
    first, second = events
    assert isinstance(first, PromptScored)
    assert [item.row for item in first.positions] == [1]
    assert isinstance(second, TokensArrived)
    assert [item.logprob for item in second.logprobs] == [-0.5]


def test_results_of_an_older_epoch_are_ignored(log: Log) -> None:
    log.state("a", 1)
    log.start(6)
    log.epoch = 5
    assert log.step({1: 10}) == []
    assert log.start(5) == []
    log.epoch = 6
    assert log.state("a", 1) == []
    assert log.step({1: 10}, number=1) == [tokens("a", 10)]


def test_an_epoch_whose_start_is_missing_loses_every_open_request(log: Log) -> None:
    log.state("a", 1)
    log.epoch, log.seq = 9, 3
    assert_lost(log.step({1: 10}, number=4), "a", "b")


def test_accepted_requests_that_a_new_epoch_does_not_know_are_lost(log: Log) -> None:
    log.state("a", 1)
    log.start(6)
    # b was never accepted, so its acceptance may still be to come.
    assert_lost(log.step({}), "a")
    assert log.state("b", 1) == []
    assert log.step({1: 10}) == [tokens("b", 10)]


def test_a_request_without_a_handle_when_two_epochs_pass_is_lost_too(log: Log) -> None:
    log.state("a", 1)
    log.start(6)
    log.start(7)
    assert_lost(log.step({}), "a")


def test_an_error_fails_the_request(log: Log) -> None:
    log.state("a", 1)
    assert log.say(RequestEnded("a", "error", "no luck", "1-1")) == [
        RequestFailed("a", "no luck", engine_knows=True)
    ]
    assert log.step({1: 10}) == []


def test_a_request_may_be_refused_before_it_has_a_state(log: Log) -> None:
    [event] = log.say(RequestEnded("b", "error", "prompt too long", "1-1"))
    assert event == RequestFailed("b", "prompt too long", engine_knows=True)


def test_what_others_asked_for_is_ignored(log: Log) -> None:
    assert log.state("c", 9, [1, 2]) == []
    assert log.step({9: 3}) == []
    assert log.say(RequestEnded("c", "error", "x", "1-1")) == []


def test_an_unreadable_entry_stops_reading_until_a_new_epoch(log: Log) -> None:
    log.state("a", 1)
    entry = Entry(EntryId(5, 99), (b"nonsense",))
    assert log.sessions.apply(entry) == []
    assert log.sessions.cursor == EntryId(5, 99)
    log.seq = 99
    assert log.step({1: 10}) == []
    log.start(6)
    assert log.state("a", 1, []) == []
    assert log.step({1: 10}) == [tokens("a", 10)]


def test_a_result_that_contradicts_itself_stops_reading_until_a_new_epoch(log: Log) -> None:
    log.state("a", 1)
    assert log.step({1: 10}, {1: 77}) == []
    assert log.step({1: 11}) == []
    log.start(6)
    assert log.state("a", 1, [10]) == [tokens("a", 10)]


def test_the_requests_cursor_is_the_last_one_of_this_epoch(log: Log) -> None:
    assert log.sessions.requests_cursor is None
    log.state("a", 1)
    assert log.sessions.requests_cursor == EntryId(3, 4)
    log.start(6)
    assert log.sessions.requests_cursor is None
    log.say(RequestEnded("x", "abort", "", "8-9"))
    assert log.sessions.requests_cursor == EntryId(8, 9)


def test_a_restart_without_loss_keeps_the_place(log: Log) -> None:
    log.state("a", 1)
    before = log.sessions.cursor
    log.sessions.server_restarted(before)
    assert log.sessions.cursor == before
    assert log.step({1: 10}) == [tokens("a", 10)]


def test_a_restart_that_lost_the_tail_reads_from_the_start_for_a_newer_epoch(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    log.sessions.server_restarted(EntryId(5, 0))
    assert log.sessions.cursor == START
    log.epoch, log.seq, log.number = 5, 0, 0
    assert log.step({1: 77}, number=2) == []
    assert log.start(5) == []
    assert log.step({1: 78}, number=3) == []
    log.start(6)
    assert log.state("a", 1, [10]) == []
    assert log.step({1: 11}) == [tokens("a", 11)]


def test_a_closed_request_is_forgotten(log: Log) -> None:
    log.state("a", 1)
    log.sessions.close("a")
    log.sessions.close("a")
    assert log.step({1: 10}) == []
    assert len(log.sessions) == 1
