"""The follower of the outputs log where entries are missing, and across epochs and restarts."""

import pytest

from gateway.engine.events import Attached, ChoiceFinished, Desynchronized
from gateway.engine.outputs_follower import OutputsFollower
from shared.bus.api import START, Entry, EntryId
from shared.messages.endings import FinishReason
from shared.messages.outputs import RequestEnded
from tests.gateway.engine.outputs_log import AGAIN, ATTACHMENT, Log, assert_lost, tokens


@pytest.fixture
def log() -> Log:
    log = Log("a", "b")
    log.start(5)
    return log


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


def test_a_follower_that_began_in_the_middle_of_an_epoch_finds_trimmed_entries_missing() -> None:
    log = begun_in_the_middle(17, 9)
    log.step({9: 10})
    log.follower.requests.open("a", ATTACHMENT)
    assert log.state("a", 1) == []
    log.seq += 1  # the first result was trimmed before it was read
    log.number += 1
    assert log.step({1: 11}) == [Desynchronized("a", "entries are missing in the log")]
    log.follower.requests.attach("a")
    assert log.step({1: 12}) == []


def test_a_follower_that_has_read_no_step_takes_results_for_missing() -> None:
    log = begun_in_the_middle(17, 9)
    log.append(RequestEnded("x", "abort", "", "8-9"))
    log.follower.requests.open("a", ATTACHMENT)
    log.state("a", 1)
    # The end of the log may have been lost, and its ids have been given out again.
    assert log.step({1: 11}, number=11) == [Desynchronized("a", "results are missing in the log")]
    log.follower.requests.attach("a")
    [joined, event] = log.state("a", 1, [10, 11], attachment=AGAIN)
    assert isinstance(joined, Attached)
    assert event == tokens("a", 10, 11)
    assert log.step({1: 12}) == [tokens("a", 12)]


def test_steps_before_a_request_was_opened_show_which_step_comes_next() -> None:
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


def test_accepted_requests_that_a_new_epoch_does_not_state_are_lost(log: Log) -> None:
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
    log.append(RequestEnded("x", "abort", "", "8-9"))
    assert log.follower.requests_cursor == EntryId(8, 9)


def test_a_restart_without_loss_keeps_the_place(log: Log) -> None:
    log.state("a", 1)
    before = log.follower.cursor
    assert_lost(log.follower.server_restarted(before), "a", "b")
    assert log.follower.cursor == before
    # Its results are ignored until it has answered with what was delivered.
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


def test_a_request_lacks_its_state_until_the_epoch_states_it(log: Log) -> None:
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
    assert log.append(RequestEnded("a", "stop", "", "8-8")) == [
        ChoiceFinished("a", 0, FinishReason.STOP)
    ]
    assert log.step({}) == []
