"""The outputs log as the gateway reads it, without any I/O."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    Event,
    PrefixFound,
    PromptMissing,
    PromptScored,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.engine.outputs_follower import OutputsFollower
from shared.bus.api import START, Entry, EntryId
from shared.codec import Message, encode
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import (
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    Hypothesis,
    PromptLogprobs,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.plans import EpochStarted
from shared.messages.requests import ChoiceView
from tests.gateway.fake_engine import hypothesis, scores
from tests.support.requests import submit

# Of all requests in tests.support.requests.
ATTACHMENT = "attachment"
AGAIN = f"{ATTACHMENT}.1"


class Log:
    """Writes entries and reads them at once; those that only say "accepted" are kept apart."""

    def __init__(self, *requests: str, scored: bool = False) -> None:
        self.follower = OutputsFollower()
        self.accepted: list[str] = []
        self.start(1)
        for request_id in requests:
            self.follower.requests.open(request_id, ATTACHMENT, scored=scored)

    def say(self, *messages: Message) -> list[Event]:
        self.seq += 1
        data = tuple(encode(message) for message in messages)
        events = self.follower.apply(Entry(EntryId(self.epoch, self.seq), data))
        accepted = [event for event in events if isinstance(event, RequestAccepted)]
        self.accepted += [event.request_id for event in accepted]
        return [event for event in events if event not in accepted]

    def start(self, epoch: int) -> list[Event]:
        self.epoch, self.seq, self.number = epoch, -1, 0
        return self.say(EpochStarted(epoch, "scheduler", ("worker",)))

    def state(
        self,
        request_id: str,
        handle: int,
        output: Sequence[int] = (),
        reason: str = "",
        attachment: str = ATTACHMENT,
        overtaken: tuple[str, ...] = (),
    ) -> list[Event]:
        choice = ChoiceState(0, handle, np.array(output, np.int32), reason)
        known = replace(submit(request_id), attachment=attachment, overtaken=overtaken)
        return self.say(RequestState(known, (choice,), "3-4"))

    def step(
        self,
        tokens: dict[int, int],
        ended: dict[int, int] | None = None,
        number: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompts: tuple[PromptLogprobs, ...] = (),
        admitted: dict[int, int] | None = None,
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
                beams=(),
                logprobs=logprobs,
                prompt_logprobs=prompts,
                admitted_handles=np.array(list(admitted or {}), np.int32),
                admitted_computed=np.array(list((admitted or {}).values()), np.int32),
                num_batched_tokens=1,
                model_us=0,
                step_us=0,
            )
        )


def tokens(request_id: str, *ids: int) -> TokensArrived:
    return TokensArrived(request_id, 0, list(ids), ())


def assert_lost(events: Sequence[Event], *request_ids: str) -> None:
    assert {event.request_id for event in events} == set(request_ids)
    assert len(events) == len(request_ids)
    for event in events:
        assert isinstance(event, Desynchronized)


@pytest.fixture
def log() -> Log:
    log = Log("a", "b")
    log.start(5)
    return log


def test_a_request_is_accepted_once_by_its_first_state(log: Log) -> None:
    log.state("b", 1)
    assert log.accepted == ["b"]
    log.start(6)
    log.state("b", 1)
    assert log.accepted == ["b"]


@pytest.mark.parametrize("stated", [True, False])
def test_a_deadline_ends_what_runs_and_what_waits_with_its_reason(log: Log, stated: bool) -> None:
    if stated:
        log.state("a", 1)
        log.step({1: 10})
    ended = log.say(RequestEnded("a", "deadline", "", "3-4"))
    assert ended == [ChoiceFinished("a", 0, FinishReason.DEADLINE)]


def test_a_refusal_for_overload_is_a_failure_that_says_so(log: Log) -> None:
    [failed] = log.say(RequestEnded("a", "overloaded", "40 requests wait already", "3-4"))
    assert failed == RequestFailed(
        "a", "40 requests wait already", ended_in_engine=True, overloaded=True
    )


def test_tokens_go_to_the_requests_whose_handles_they_bear(log: Log) -> None:
    log.state("a", 1)
    log.state("b", 2)
    assert log.step({1: 10, 2: 20, 3: 30}) == [tokens("a", 10), tokens("b", 20)]


def test_a_flag_ends_a_choice_and_later_tokens_are_ignored(log: Log) -> None:
    log.state("a", 1)
    assert log.step({1: 10}, {1: 2}) == [
        tokens("a", 10),
        ChoiceFinished("a", 0, FinishReason.LENGTH),
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
    assert log.step({1: 13}, number=4) == []
    # One attachment is enough.
    assert log.step({1: 15}, number=6) == []


def begun_in_the_middle(seq: int, number: int) -> Log:
    """A log whose start was trimmed, as a new gateway finds it, and a request that comes then."""
    log = Log()
    log.follower = OutputsFollower()
    log.epoch, log.seq, log.number = 5, seq, number
    return log


def test_who_began_in_the_middle_of_an_epoch_misses_entries_that_were_trimmed() -> None:
    log = begun_in_the_middle(17, 9)
    log.step({9: 10})
    log.follower.requests.open("a", ATTACHMENT)
    assert log.state("a", 1) == []
    log.seq += 1  # the first result was trimmed before it was read
    log.number += 1
    assert log.step({1: 11}) == [Desynchronized("a", "entries are missing in the log")]
    log.follower.requests.attach("a")
    assert log.step({1: 12}) == []


def test_who_knows_no_step_cannot_know_that_none_is_missing() -> None:
    log = begun_in_the_middle(17, 9)
    log.say(RequestEnded("x", "abort", "", "8-9"))
    log.follower.requests.open("a", ATTACHMENT)
    log.state("a", 1)
    # The end of the log may have been lost, and its ids have been given out again.
    assert log.step({1: 11}, number=11) == [Desynchronized("a", "results are missing in the log")]
    log.follower.requests.attach("a")
    [joined, event] = log.state("a", 1, [10, 11], attachment=AGAIN)
    assert isinstance(joined, Attached)
    assert event == tokens("a", 10, 11)
    assert log.step({1: 12}) == [tokens("a", 12)]


def test_what_was_in_the_log_before_a_request_tells_which_step_comes_next() -> None:
    log = begun_in_the_middle(17, 9)
    log.step({9: 90})
    log.follower.requests.open("a", ATTACHMENT)
    log.state("a", 1)
    assert log.step({1: 10}) == [tokens("a", 10)]
    assert_lost(log.step({1: 12}, number=13), "a")


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
        ChoiceFinished("a", 0, FinishReason.STOP),
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
    assert log.start(6) == []
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
        RequestFailed("a", "no luck", ended_in_engine=True)
    ]
    assert log.step({1: 10}) == []


def test_a_request_may_be_refused_before_it_has_a_state(log: Log) -> None:
    [event] = log.say(RequestEnded("b", "error", "prompt too long", "1-1"))
    assert event == RequestFailed("b", "prompt too long", ended_in_engine=True)


def test_what_others_asked_for_is_ignored(log: Log) -> None:
    assert log.state("c", 9, [1, 2]) == []
    assert log.step({9: 3}) == []
    assert log.say(RequestEnded("c", "error", "x", "1-1")) == []


def test_an_unreadable_entry_stops_reading_until_a_new_epoch(log: Log) -> None:
    log.state("a", 1)
    entry = Entry(EntryId(5, 99), (b"nonsense",))
    assert log.follower.apply(entry) == []
    assert log.follower.cursor == EntryId(5, 99)
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
    assert log.follower.requests_cursor is None
    log.state("a", 1)
    assert log.follower.requests_cursor == EntryId(3, 4)
    log.start(6)
    assert log.follower.requests_cursor is None
    log.say(RequestEnded("x", "abort", "", "8-9"))
    assert log.follower.requests_cursor == EntryId(8, 9)


def test_a_restart_without_loss_keeps_the_place(log: Log) -> None:
    log.state("a", 1)
    before = log.follower.cursor
    assert_lost(log.follower.server_restarted(before), "a", "b")
    assert log.follower.cursor == before
    # What it writes is not believed before it knows what was delivered.
    assert log.step({1: 10}) == []
    log.follower.requests.attach("a")
    log.state("a", 2, [10], attachment=AGAIN)
    assert log.step({2: 11}) == [tokens("a", 11)]


def test_a_restart_that_lost_the_tail_reads_from_the_start_for_a_newer_epoch(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert_lost(log.follower.server_restarted(EntryId(5, 0)), "a", "b")
    [view] = log.follower.requests.attach("a").views()
    assert (view.tokens.tolist(), view.finish_reason) == ([10], "")
    assert log.follower.cursor == START
    log.epoch, log.seq, log.number = 5, 0, 0
    assert log.step({1: 77}, number=2) == []
    assert log.start(5) == []
    assert log.step({1: 78}, number=3) == []
    log.start(6)
    assert log.state("a", 1, [10]) == []
    assert log.step({1: 11}) == []
    [joined, event] = log.state("a", 2, [10, 12], attachment=AGAIN)
    assert isinstance(joined, Attached)
    assert event == tokens("a", 12)
    assert log.step({2: 13}) == [tokens("a", 13)]


def test_a_restart_that_lost_whole_epochs_may_be_followed_by_a_lower_one(log: Log) -> None:
    log.start(7)
    log.state("a", 1)
    assert_lost(log.follower.server_restarted(EntryId(3, 5)), "a", "b")
    log.follower.requests.attach("a")
    log.start(4)
    joined, more = log.state("a", 1, [10], attachment=AGAIN)
    assert isinstance(joined, Attached)
    assert more == tokens("a", 10)


def test_a_closed_request_is_forgotten(log: Log) -> None:
    log.state("a", 1)
    log.follower.requests.close("a")
    log.follower.requests.close("a")
    assert log.step({1: 10}) == []
    assert len(log.follower.requests) == 1


# ------------------------------------------------------------------ attaching


def attached(log: Log, request_id: str = "a") -> Log:
    """Two tokens were delivered, then one step was missing, and the gateway said so."""
    log.state(request_id, 1)
    log.step({1: 10})
    log.step({1: 11})
    log.step({1: 13}, number=4)
    [view] = log.follower.requests.attach(request_id).views()
    assert view.tokens.tolist() == [10, 11]
    return log


def test_an_answer_to_an_attachment_continues_what_was_delivered(log: Log) -> None:
    attached(log)
    joined, more = log.state("a", 9, [10, 11, 12, 13], attachment=AGAIN)
    assert isinstance(joined, Attached)
    assert more == tokens("a", 12, 13)
    assert log.step({1: 99, 9: 14}) == [tokens("a", 14)]


@pytest.mark.parametrize("attachment", [ATTACHMENT, "somebody else's"])
def test_states_before_the_answer_are_not_believed(log: Log, attachment: str) -> None:
    attached(log)
    assert log.state("a", 9, [10, 11, 12], attachment=attachment) == []
    assert log.step({9: 13}) == []
    _, more = log.state("a", 10, [10, 11, 55], attachment=AGAIN)
    assert more == tokens("a", 55)


def test_the_log_cannot_answer_before_the_attachment_has_a_name(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    log.step({1: 12}, number=3)
    assert log.state("a", 2, [10, 11]) == []
    log.follower.requests.attach("a")
    _, more = log.state("a", 2, [10, 11], attachment=AGAIN)
    assert more == tokens("a", 11)


@pytest.mark.parametrize("output", [[10], [10, 99], [10, 99, 12]])
def test_an_answer_that_contradicts_what_was_delivered_ends_the_request(
    log: Log, output: list[int]
) -> None:
    attached(log)
    _, event = log.state("a", 9, output, attachment=AGAIN)
    assert isinstance(event, RequestFailed)
    assert not event.ended_in_engine
    assert "cannot be continued" in event.error


def test_endings_while_an_answer_is_awaited_do_not_tell_the_tokens_before_them(log: Log) -> None:
    attached(log)
    assert log.say(RequestEnded("a", "stop", "", "8-8")) == []
    assert log.say(ChoiceEnded("a", 0, "stop", "8-8")) == []
    _, more, end = log.state("a", 0, [10, 11, 12], "stop", attachment=AGAIN)
    assert (more, end) == (tokens("a", 12), ChoiceFinished("a", 0, FinishReason.STOP))


def test_a_request_that_the_engine_gives_up_is_waited_for_no_more(log: Log) -> None:
    attached(log)
    [event] = log.say(RequestEnded("a", "error", "no luck", "8-8"))
    assert event == RequestFailed("a", "no luck", ended_in_engine=True)


def test_an_abort_of_an_earlier_delivery_is_no_answer_to_an_attachment(log: Log) -> None:
    attached(log)
    assert log.say(RequestEnded("a", "abort", "", "3-4")) == []
    _, more = log.state("a", 9, [10, 11, 12], attachment=AGAIN)
    assert more == tokens("a", 12)


def test_an_engine_that_does_not_have_what_is_attached_to_gets_its_prompt(log: Log) -> None:
    attached(log)
    assert log.say(RequestEnded("a", "unknown", "", "8-8")) == [PromptMissing("a")]
    _, more = log.state("a", 9, [10, 11, 12], attachment=AGAIN)
    assert more == tokens("a", 12)


def test_who_was_delivering_what_is_not_remembered_says_it_again(log: Log) -> None:
    log.follower.requests.open("c", "first")
    log.state("c", 9, [], attachment="first")
    [lost] = log.say(RequestEnded("c", "unknown", "", "8-8"))
    assert isinstance(lost, Desynchronized)
    assert log.follower.requests.awaits("c")


def test_a_refusal_that_an_attachment_follows_leaves_something_to_abort(log: Log) -> None:
    log.follower.requests.attach("a")
    [failed] = log.say(RequestEnded("a", "overloaded", "40 requests wait already", "3-4"))
    assert failed == RequestFailed(
        "a", "40 requests wait already", ended_in_engine=False, overloaded=True
    )


def test_tokens_whose_scores_were_missed_come_again() -> None:
    log = Log("a", scored=True)
    log.start(5)
    log.state("a", 1)
    log.step({1: 10}, logprobs=(scores(10, -0.5, {10: -0.5}),))
    assert_lost(log.step({1: 12}, number=3), "a")
    log.follower.requests.attach("a")
    [joined] = log.state("a", 2, [10], attachment=AGAIN)
    assert isinstance(joined, Attached)
    [event] = log.step({2: 11}, logprobs=(scores(11, -0.25, {11: -0.25}),))
    assert isinstance(event, TokensArrived)
    assert [item.logprob for item in event.logprobs] == [-0.25]


def test_tokens_that_came_without_scores_while_an_answer_was_awaited_are_asked_for_again() -> None:
    log = Log("a", scored=True)
    log.start(5)
    log.state("a", 1)
    assert_lost(log.follower.server_restarted(log.follower.cursor), "a")
    log.follower.requests.attach("a")
    assert_lost(log.state("a", 2, [10], attachment=AGAIN), "a")
    assert log.step({2: 11}) == []
    [view] = log.follower.requests.attach("a").views()
    assert view.tokens.tolist() == []
    [joined] = log.state("a", 3, attachment=f"{ATTACHMENT}.2")
    assert isinstance(joined, Attached)


def test_another_delivery_of_a_request_ends_this_one(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    assert log.state("a", 2, [10], attachment="another gateway's") == [Superseded("a")]
    assert log.step({1: 11, 2: 11}) == []


def test_an_earlier_attachment_of_this_gateway_is_no_other_delivery(log: Log) -> None:
    attached(log)
    log.state("a", 9, [10, 11], attachment=AGAIN)
    # A Submit that was thought to be lost arrives late.
    assert log.state("a", 10, [10, 11, 12]) == [tokens("a", 12)]
    assert log.follower.requests.attachment_of("a") == ATTACHMENT


def test_who_asks_again_learns_that_another_has_taken_over(log: Log) -> None:
    log.state("a", 1, overtaken=("long gone",))
    assert_lost(log.step({1: 10}, number=2), "a", "b")
    assert log.follower.requests.attach("a").overtaken == ("long gone",)
    assert log.state("a", 8, [10], attachment="earlier", overtaken=("long gone",)) == []
    overtaken = ("long gone", ATTACHMENT)
    assert log.state("a", 9, [10], attachment="other", overtaken=overtaken) == [Superseded("a")]


def test_who_takes_over_waits_for_the_answer_whoever_has_the_request(log: Log) -> None:
    log.follower.requests.open("c", "first")
    assert log.follower.requests.attach("c").overtaken == ()
    assert log.state("c", 8, [10], attachment="other", overtaken=("another",)) == []
    _, more = log.state("c", 9, [10], attachment="first.1", overtaken=("another", "other"))
    assert more == tokens("c", 10)


def test_who_was_overtaken_before_any_answer_learns_of_it(log: Log) -> None:
    log.follower.requests.open("c", "first")
    log.follower.requests.attach("c")
    assert log.state("c", 8, attachment="other.2", overtaken=("first",)) == [Superseded("c")]


def test_who_only_looks_and_was_overtaken_learns_of_it(log: Log) -> None:
    log.follower.requests.look_up("c", "looks")
    assert log.state("c", 8, attachment="another", overtaken=("other",)) == []
    assert log.state("c", 9, attachment="other", overtaken=("looks",)) == [Superseded("c")]
    assert not log.follower.requests.awaits("c")


def test_a_choice_that_was_cut_is_viewed_as_far_as_it_counts(log: Log) -> None:
    log.follower.requests.open("c", ATTACHMENT, num_choices=2)
    several(log, (0, 5, [], ""), (1, 6, [], ""), request_id="c")
    for number in range(3):
        log.step({5: number, 6: number})
    log.follower.requests.close_choice("c", 0, 2, FinishReason.STOP)
    views = log.follower.requests.attach("c").views()
    assert [view.tokens.tolist() for view in views] == [[0, 1], [0, 1, 2]]
    assert [view.finish_reason for view in views] == ["stop", ""]


def test_a_request_that_was_shown_elsewhere_goes_on_after_that(log: Log) -> None:
    view = ChoiceView(np.array([10, 11], np.int32), "")
    log.follower.requests.open("c", "first", views=[view])
    log.follower.requests.attach("c")
    _, more = log.state("c", 5, [10, 11, 12], attachment="first.1")
    assert more == tokens("c", 12)


def test_what_is_looked_up_is_told_once(log: Log) -> None:
    log.follower.requests.look_up("c", "look")
    assert log.state("c", 5, [9], attachment="other") == []
    [joined] = log.state("c", 6, [10, 11], attachment="look")
    assert isinstance(joined, Attached)
    assert (joined.outputs, joined.finish_reasons) == (((10, 11),), ("",))
    assert log.state("c", 6, [10, 11], attachment="look") == []


@pytest.mark.parametrize("reason", ["unknown", "error", "abort"])
def test_what_is_looked_up_may_not_be_remembered(log: Log, reason: str) -> None:
    log.follower.requests.look_up("c", "look")
    assert log.say(RequestEnded("c", reason, "", "1-1")) == [UnknownRequest("c")]
    assert not log.follower.requests.awaits("c")


# ------------------------------------------------------------- several choices


def several(
    log: Log, *choices: tuple[int, int, Sequence[int], str], request_id: str = "a"
) -> list[Event]:
    """A state of (choice, handle, output, reason)."""
    known = tuple(
        ChoiceState(choice, handle, np.array(output, np.int32), reason)
        for choice, handle, output, reason in choices
    )
    num_choices = 1 + max(state.choice for state in known)
    return log.say(RequestState(submit(request_id, num_choices=num_choices), known, "3-4"))


def choice_ended(log: Log, choice: int, reason: str = "stop", cursor: str = "4-4") -> list[Event]:
    return log.say(ChoiceEnded("a", choice, reason, cursor))


@pytest.fixture
def three() -> Log:
    """One request of three choices, under the handles 10, 11 and 12."""
    log = Log()
    log.follower.requests.open("a", ATTACHMENT, num_choices=3)
    log.start(5)
    assert several(log, (0, 10, [], ""), (1, 11, [], ""), (2, 12, [], "")) == []
    return log


def tokens_in(choice: int, *ids: int) -> TokensArrived:
    return TokensArrived("a", choice, list(ids), ())


def finished(choice: int, reason: FinishReason) -> ChoiceFinished:
    return ChoiceFinished("a", choice, reason)


def test_tokens_go_to_the_choices_whose_handles_they_bear(three: Log) -> None:
    assert three.step({12: 2, 10: 0}) == [tokens_in(2, 2), tokens_in(0, 0)]


def test_a_flag_ends_one_choice_alone(three: Log) -> None:
    assert three.step({10: 5, 11: 6}, {11: 1}) == [
        tokens_in(0, 5),
        tokens_in(1, 6),
        finished(1, FinishReason.STOP),
    ]
    assert three.step({10: 7, 11: 8, 12: 9}) == [tokens_in(0, 7), tokens_in(2, 9)]


def test_a_choice_that_ended_ignores_further_endings(three: Log) -> None:
    assert choice_ended(three, 1) == [finished(1, FinishReason.STOP)]
    assert choice_ended(three, 1, "length") == []
    assert three.step({11: 8}) == []
    three.step({10: 5}, {10: 2})
    assert choice_ended(three, 0) == []
    assert three.follower.requests_cursor == EntryId(4, 4)


def test_an_ending_of_a_choice_that_is_not_there_loses_the_request(three: Log) -> None:
    assert_lost(choice_ended(three, 3), "a")
    assert choice_ended(three, 1) == []
    assert three.step({10: 5}) == []


def test_the_end_of_the_request_ends_the_choices_that_are_left(three: Log) -> None:
    three.step({10: 5}, {10: 2})
    choice_ended(three, 2)
    assert three.say(RequestEnded("a", "stop", "", "5-5")) == [finished(1, FinishReason.STOP)]


def test_an_error_fails_the_request_while_a_choice_goes_on(three: Log) -> None:
    three.step({10: 5}, {10: 2})
    assert three.say(RequestEnded("a", "error", "no luck", "5-5")) == [
        RequestFailed("a", "no luck", ended_in_engine=True)
    ]


def test_an_error_after_the_last_ending_is_no_news(three: Log) -> None:
    for choice in range(3):
        choice_ended(three, choice)
    assert three.say(RequestEnded("a", "error", "too late", "5-5")) == []


def test_a_state_continues_running_choices_and_ends_the_others(three: Log) -> None:
    three.step({10: 5, 11: 6, 12: 7})
    three.step({10: 8, 12: 9}, {12: 2})
    three.start(6)
    # In any order: choices are known by their index.
    events = several(
        three, (2, 0, [7, 9], "length"), (1, 0, [6, 4], "stop"), (0, 20, [5, 8, 3], "")
    )
    assert events == [tokens_in(0, 3), tokens_in(1, 4), finished(1, FinishReason.STOP)]
    # Handle 0 of the ended ones is nobody's.
    assert three.step({0: 99, 20: 1}) == [tokens_in(0, 1)]


def test_a_choice_that_nobody_waits_for_may_have_another_history(three: Log) -> None:
    three.step({10: 5, 11: 6, 12: 7})
    three.follower.requests.close_choice("a", 1, 1, FinishReason.STOP)
    three.follower.requests.close_choice("a", 1, 1, FinishReason.STOP)
    assert three.step({10: 5, 11: 6}) == [tokens_in(0, 5)]
    three.start(6)
    assert several(three, (0, 20, [5, 5], ""), (1, 21, [4], ""), (2, 22, [7], "")) == []
    assert three.step({20: 1, 21: 2}) == [tokens_in(0, 1)]


@pytest.mark.parametrize("numbers", [(0, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_a_state_with_other_choices_loses_the_request(three: Log, numbers: tuple[int, ...]) -> None:
    assert_lost(several(three, *((number, 30 + number, [], "") for number in numbers)), "a")
    assert three.step({10: 5, 30: 6}) == []


def test_a_state_with_another_history_of_one_choice_loses_the_request(three: Log) -> None:
    three.step({10: 5, 11: 6})
    events = several(three, (0, 10, [5], ""), (1, 11, [7], ""), (2, 12, [], ""))
    assert_lost(events, "a")
    assert three.step({10: 6, 12: 6}) == []


def test_only_the_first_admission_tells_what_was_cached(three: Log) -> None:
    assert three.step({}, admitted={9: 7, 10: 32}) == [PrefixFound("a", 32)]
    assert three.step({10: 5}, admitted={10: 48, 11: 48}) == [tokens_in(0, 5)]
    three.start(6)
    several(three, (0, 20, [5], ""), (1, 21, [], ""), (2, 22, [], ""))
    assert three.step({}, admitted={20: 16}) == []


def test_an_admission_in_a_repeated_step_is_dropped(three: Log) -> None:
    assert three.step({}, number=0, admitted={10: 32}) == []
    assert three.step({}, number=1, admitted={10: 16}) == [PrefixFound("a", 16)]


# --------------------------------------------------------------- beam searches


class SearchLog(Log):
    """One beam search of two beams, and a request of one choice that is drawn."""

    def __init__(self, scored: bool = False) -> None:
        super().__init__("b")
        self.follower.requests.open("a", ATTACHMENT, num_choices=2, scored=scored, is_search=True)
        self.start(5)

    def beams(self, *beams: tuple[int, Sequence[int], str]) -> list[Event]:
        """A state of (handle, output, reason), whatever their number."""
        known = tuple(
            ChoiceState(number, handle, np.array(output, np.int32), reason)
            for number, (handle, output, reason) in enumerate(beams)
        )
        return self.say(RequestState(submit("a", num_choices=2), known, "3-4"))

    def end_search(self, *found: Hypothesis, request_id: str = "a") -> list[Event]:
        return self.say(BeamsEnded(request_id, found, "6-7"))


BEST, SECOND = hypothesis([5, 6, 1], score=-0.5, reason="stop"), hypothesis([5, 7], score=-0.75)
ANSWER: list[Event] = [
    TokensArrived("a", 0, [5, 6, 1], ()),
    ChoiceFinished("a", 0, FinishReason.STOP, -0.5),
    TokensArrived("a", 1, [5, 7], ()),
    ChoiceFinished("a", 1, FinishReason.LENGTH, -0.75),
]


@pytest.fixture
def search() -> SearchLog:
    return SearchLog()


def test_a_search_delivers_all_choices_at_its_end(search: SearchLog) -> None:
    assert search.beams((3, [], "")) == []
    assert search.step({}) == []
    assert search.end_search(BEST, SECOND) == ANSWER
    assert search.follower.requests_cursor == EntryId(6, 7)


@pytest.mark.parametrize("attached", [True, False])
def test_a_search_that_is_out_of_time_ends_with_nothing(search: SearchLog, attached: bool) -> None:
    search.beams((3, [], ""))
    if attached:
        search.follower.requests.attach("a")
    assert search.say(RequestEnded("a", "deadline", "", "3-4")) == [
        ChoiceFinished("a", 0, FinishReason.DEADLINE),
        ChoiceFinished("a", 1, FinishReason.DEADLINE),
    ]


def test_only_the_first_end_of_a_search_counts(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.end_search(BEST, SECOND)
    assert search.end_search(SECOND, BEST) == []
    assert search.say(RequestEnded("a", "error", "too late", "8-8")) == []


def test_tokens_of_a_search_come_with_scores_if_asked_for() -> None:
    search = SearchLog(scored=True)
    search.beams((3, [], ""))
    first, _, second, _ = search.end_search(BEST, SECOND)
    assert isinstance(first, TokensArrived)
    assert isinstance(second, TokensArrived)
    assert [item.logprob for item in first.logprobs] == [-0.5, -0.5, -0.5]
    assert len(second.logprobs) == 2


def test_a_state_of_a_search_is_not_what_was_delivered(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.start(6)
    assert search.beams((4, [5, 6], ""), (4, [8, 8], ""), (0, [9], "stop"), (0, [2], "stop")) == []
    search.start(7)
    # Other beams than before: nobody has seen them.
    assert search.beams((5, [7], ""), (5, [8], "")) == []
    assert search.step({}) == []
    assert search.end_search(BEST, SECOND) == ANSWER


def test_a_search_that_ends_while_it_is_looked_up_is_still_asked_for(search: SearchLog) -> None:
    search.follower.requests.close("a")
    search.follower.requests.look_up("a", "new")
    assert search.end_search(BEST, SECOND) == []
    assert search.follower.requests.awaits("a")


def test_a_search_whose_beams_have_all_finished_is_waited_for(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.start(6)
    assert search.beams((0, [5], "stop"), (0, [6], "stop")) == []
    assert search.step({}) == []
    # And is attached to when the log forgets it all the same.
    search.start(7)
    assert_lost(search.step({}), "a")


def test_a_search_that_a_new_epoch_does_not_know_is_lost(search: SearchLog) -> None:
    search.beams((3, [5], ""))
    search.start(6)
    assert_lost(search.step({}), "a")
    assert search.follower.requests.attach("a").views() == ()
    assert search.end_search(BEST, SECOND) == ANSWER


def test_a_search_may_end_in_a_new_epoch_without_a_state(search: SearchLog) -> None:
    search.beams((3, [5], ""))
    search.start(6)
    assert search.end_search(BEST, SECOND) == ANSWER
    assert search.step({}) == []


def test_a_gap_loses_a_search_too(search: SearchLog) -> None:
    search.beams((3, [5], ""))
    search.step({})
    assert_lost(search.step({}, number=3), "a", "b")


def test_the_first_admission_of_a_search_tells_what_was_cached(search: SearchLog) -> None:
    search.beams((3, [], ""))
    assert search.step({}, admitted={3: 16, 9: 8}) == [PrefixFound("a", 16)]
    search.start(6)
    search.beams((4, [5], ""))
    assert search.step({}, admitted={3: 48, 4: 32}) == []


def test_no_row_of_a_result_is_a_choice_of_a_search(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.state("b", 4)
    assert search.step({3: 77, 4: 10}, {3: 1}) == [tokens("b", 10)]
    assert search.end_search(BEST, SECOND) == ANSWER


def test_a_closed_search_is_forgotten(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.follower.requests.close("a")
    assert search.step({}, admitted={3: 16}) == []
    assert search.end_search(BEST, SECOND) == []


@pytest.mark.parametrize("found", [(), (BEST,), (BEST, SECOND, SECOND), (BEST, hypothesis([]))])
def test_a_search_that_ends_with_no_answer_fails(
    search: SearchLog, found: tuple[Hypothesis, ...]
) -> None:
    search.beams((3, [], ""))
    [event] = search.end_search(*found)
    assert isinstance(event, RequestFailed)
    assert event.ended_in_engine
    assert "hypothes" in event.error
    assert search.end_search(BEST, SECOND) == []


def test_hypotheses_of_a_request_that_is_no_search_fail_it(search: SearchLog) -> None:
    search.state("b", 4)
    [event] = search.end_search(BEST, request_id="b")
    assert isinstance(event, RequestFailed)
    assert "no search" in event.error


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_search_that_ends_without_hypotheses_fails(search: SearchLog, reason: str) -> None:
    search.beams((3, [], ""))
    error = f"the request ended with {reason!r}"
    assert search.say(RequestEnded("a", reason, "", "8-8")) == [
        RequestFailed("a", error, ended_in_engine=True)
    ]


def test_what_the_log_must_speak_of_is_known(log: Log) -> None:
    assert log.follower.requests.lacks_state("a")
    log.state("a", 1)
    assert not log.follower.requests.lacks_state("a")
    log.start(6)
    assert log.follower.requests.lacks_state("a")
    log.state("a", 1)
    assert not log.follower.requests.lacks_state("a")
    log.step({1: 10})
    log.follower.requests.attach("a")
    assert not log.follower.requests.lacks_state("a"), "an Attach is repeated anyway"


def test_a_request_that_ended_before_its_state_came_is_not_lost_afterwards(log: Log) -> None:
    log.state("a", 1)
    log.step({1: 10})
    log.start(6)
    assert log.say(RequestEnded("a", "stop", "", "8-8")) == [
        ChoiceFinished("a", 0, FinishReason.STOP)
    ]
    assert log.step({}) == []
