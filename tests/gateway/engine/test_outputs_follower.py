"""Tokens, states and ends in the outputs log become events of the open requests."""

import pytest

from gateway.engine.events import ChoiceFinished, PromptScored, RequestFailed, TokensArrived
from shared.messages.endings import FinishReason
from shared.messages.outputs import PromptLogprobs, RequestEnded
from tests.gateway.engine.outputs_log import Log, assert_lost, tokens
from tests.gateway.fake_engine import scores


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
    ended = log.append(RequestEnded("a", "deadline", "", "3-4"))
    assert ended == [ChoiceFinished("a", 0, FinishReason.DEADLINE)]


def test_a_refusal_for_overload_is_a_failure_that_is_marked_as_one(log: Log) -> None:
    [failed] = log.append(RequestEnded("a", "overloaded", "40 requests wait already", "3-4"))
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
    assert log.append(RequestEnded("a", "error", "too late", "0-0")) == []


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


def test_tokens_without_requested_logprobs_are_an_error() -> None:
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


def test_an_error_fails_the_request(log: Log) -> None:
    log.state("a", 1)
    assert log.append(RequestEnded("a", "error", "no luck", "1-1")) == [
        RequestFailed("a", "no luck", ended_in_engine=True)
    ]
    assert log.step({1: 10}) == []


def test_a_request_may_be_refused_before_it_has_a_state(log: Log) -> None:
    [event] = log.append(RequestEnded("b", "error", "prompt too long", "1-1"))
    assert event == RequestFailed("b", "prompt too long", ended_in_engine=True)


def test_requests_of_other_gateways_are_ignored(log: Log) -> None:
    assert log.state("c", 9, [1, 2]) == []
    assert log.step({9: 3}) == []
    assert log.append(RequestEnded("c", "error", "x", "1-1")) == []


def test_a_closed_request_is_forgotten(log: Log) -> None:
    log.state("a", 1)
    log.follower.requests.close("a")
    log.follower.requests.close("a")
    assert log.step({1: 10}) == []
    assert len(log.follower.requests) == 1
