"""The follower of the outputs log for a request of several choices."""

import pytest

from gateway.engine.events import ChoiceFinished, Event, PrefixFound, RequestFailed, TokensArrived
from shared.bus.api import EntryId
from shared.messages.endings import FinishReason
from shared.messages.outputs import ChoiceEnded, RequestEnded
from tests.gateway.engine.outputs_log import ATTACHMENT, Log, assert_lost, several


def choice_ended(log: Log, choice: int, reason: str = "stop", cursor: str = "4-4") -> list[Event]:
    return log.append(ChoiceEnded("a", choice, reason, cursor))


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
    assert three.append(RequestEnded("a", "stop", "", "5-5")) == [finished(1, FinishReason.STOP)]


def test_an_error_fails_the_request_while_a_choice_goes_on(three: Log) -> None:
    three.step({10: 5}, {10: 2})
    assert three.append(RequestEnded("a", "error", "no luck", "5-5")) == [
        RequestFailed("a", "no luck", ended_in_engine=True)
    ]


def test_an_error_after_the_last_ending_is_ignored(three: Log) -> None:
    for choice in range(3):
        choice_ended(three, choice)
    assert three.append(RequestEnded("a", "error", "too late", "5-5")) == []


def test_a_state_continues_running_choices_and_ends_the_others(three: Log) -> None:
    three.step({10: 5, 11: 6, 12: 7})
    three.step({10: 8, 12: 9}, {12: 2})
    three.start(6)
    # In any order: choices are known by their index.
    events = several(
        three, (2, 0, [7, 9], "length"), (1, 0, [6, 4], "stop"), (0, 20, [5, 8, 3], "")
    )
    assert events == [tokens_in(0, 3), tokens_in(1, 4), finished(1, FinishReason.STOP)]
    # Handle 0, which ended choices have, belongs to none.
    assert three.step({0: 99, 20: 1}) == [tokens_in(0, 1)]


def test_a_finished_choice_may_have_another_history(three: Log) -> None:
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


def test_only_the_first_admission_shows_what_was_cached(three: Log) -> None:
    assert three.step({}, admitted={9: 7, 10: 32}) == [PrefixFound("a", 32)]
    assert three.step({10: 5}, admitted={10: 48, 11: 48}) == [tokens_in(0, 5)]
    three.start(6)
    several(three, (0, 20, [5], ""), (1, 21, [], ""), (2, 22, [], ""))
    assert three.step({}, admitted={20: 16}) == []


def test_an_admission_in_a_repeated_step_is_dropped(three: Log) -> None:
    assert three.step({}, number=0, admitted={10: 32}) == []
    assert three.step({}, number=1, admitted={10: 16}) == [PrefixFound("a", 16)]
