"""The follower of the outputs log for a beam search."""

from collections.abc import Sequence

import numpy as np
import pytest

from gateway.engine.events import ChoiceFinished, Event, PrefixFound, RequestFailed, TokensArrived
from shared.bus.api import EntryId
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceState, Hypothesis, RequestEnded, RequestState
from tests.gateway.engine.outputs_log import ATTACHMENT, Log, assert_lost, tokens
from tests.gateway.fake_engine import hypothesis
from tests.support.requests import submit


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
        return self.append(RequestState(submit("a", num_choices=2), known, "3-4"))

    def end_search(self, *found: Hypothesis, request_id: str = "a") -> list[Event]:
        return self.append(BeamsEnded(request_id, found, "6-7"))


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
    assert search.append(RequestEnded("a", "deadline", "", "3-4")) == [
        ChoiceFinished("a", 0, FinishReason.DEADLINE),
        ChoiceFinished("a", 1, FinishReason.DEADLINE),
    ]


def test_only_the_first_end_of_a_search_counts(search: SearchLog) -> None:
    search.beams((3, [], ""))
    search.end_search(BEST, SECOND)
    assert search.end_search(SECOND, BEST) == []
    assert search.append(RequestEnded("a", "error", "too late", "8-8")) == []


def test_tokens_of_a_search_come_with_scores_if_requested() -> None:
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
    # Other beams than before: none was delivered.
    assert search.beams((5, [7], ""), (5, [8], "")) == []
    assert search.step({}) == []
    assert search.end_search(BEST, SECOND) == ANSWER


def test_a_look_up_goes_on_when_its_search_ends(search: SearchLog) -> None:
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


def test_a_search_that_a_new_epoch_does_not_state_is_lost(search: SearchLog) -> None:
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


def test_the_first_admission_of_a_search_shows_what_was_cached(search: SearchLog) -> None:
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
    assert search.append(RequestEnded("a", reason, "", "8-8")) == [
        RequestFailed("a", error, ended_in_engine=True)
    ]
