"""The follower of the outputs log while an Attach or a look-up has no answer."""

import numpy as np
import pytest

from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    PromptMissing,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from shared.messages.endings import FinishReason
from shared.messages.outputs import ChoiceEnded, RequestEnded
from shared.messages.requests import ChoiceView
from tests.gateway.engine.outputs_log import AGAIN, ATTACHMENT, Log, assert_lost, several, tokens
from tests.gateway.fake_engine import scores


@pytest.fixture
def log() -> Log:
    log = Log("a", "b")
    log.start(5)
    return log


def attached(log: Log, request_id: str = "a") -> Log:
    """Two tokens were delivered, then one step was missing, and the gateway attached."""
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


@pytest.mark.parametrize("attachment", [ATTACHMENT, "another delivery's"])
def test_states_before_the_answer_are_ignored(log: Log, attachment: str) -> None:
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


def test_endings_while_an_answer_is_awaited_lack_the_tokens_before_them(log: Log) -> None:
    attached(log)
    assert log.append(RequestEnded("a", "stop", "", "8-8")) == []
    assert log.append(ChoiceEnded("a", 0, "stop", "8-8")) == []
    _, more, end = log.state("a", 0, [10, 11, 12], "stop", attachment=AGAIN)
    assert (more, end) == (tokens("a", 12), ChoiceFinished("a", 0, FinishReason.STOP))


def test_a_request_that_the_engine_gives_up_is_waited_for_no_more(log: Log) -> None:
    attached(log)
    [event] = log.append(RequestEnded("a", "error", "no luck", "8-8"))
    assert event == RequestFailed("a", "no luck", ended_in_engine=True)


def test_an_abort_of_an_earlier_delivery_is_no_answer_to_an_attachment(log: Log) -> None:
    attached(log)
    assert log.append(RequestEnded("a", "abort", "", "3-4")) == []
    _, more = log.state("a", 9, [10, 11, 12], attachment=AGAIN)
    assert more == tokens("a", 12)


def test_an_engine_that_does_not_have_what_is_attached_to_gets_its_prompt(log: Log) -> None:
    attached(log)
    assert log.append(RequestEnded("a", "unknown", "", "8-8")) == [PromptMissing("a")]
    _, more = log.state("a", 9, [10, 11, 12], attachment=AGAIN)
    assert more == tokens("a", 12)


def test_a_delivered_request_that_the_engine_has_forgotten_is_attached_to(log: Log) -> None:
    log.follower.requests.open("c", "first")
    log.state("c", 9, [], attachment="first")
    [lost] = log.append(RequestEnded("c", "unknown", "", "8-8"))
    assert isinstance(lost, Desynchronized)
    assert log.follower.requests.awaits("c")


def test_a_refusal_that_an_attachment_follows_leaves_something_to_abort(log: Log) -> None:
    log.follower.requests.attach("a")
    [failed] = log.append(RequestEnded("a", "overloaded", "40 requests wait already", "3-4"))
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


def test_tokens_without_scores_before_an_awaited_answer_are_requested_again() -> None:
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


def test_an_attachment_is_superseded_if_another_delivery_has_taken_over(log: Log) -> None:
    log.state("a", 1, overtaken=("long gone",))
    assert_lost(log.step({1: 10}, number=2), "a", "b")
    assert log.follower.requests.attach("a").overtaken == ("long gone",)
    assert log.state("a", 8, [10], attachment="earlier", overtaken=("long gone",)) == []
    overtaken = ("long gone", ATTACHMENT)
    assert log.state("a", 9, [10], attachment="other", overtaken=overtaken) == [Superseded("a")]


def test_a_take_over_waits_for_its_own_answer_whichever_delivery_has_the_request(log: Log) -> None:
    log.follower.requests.open("c", "first")
    assert log.follower.requests.attach("c").overtaken == ()
    assert log.state("c", 8, [10], attachment="other", overtaken=("another",)) == []
    _, more = log.state("c", 9, [10], attachment="first.1", overtaken=("another", "other"))
    assert more == tokens("c", 10)


def test_an_attachment_overtaken_before_any_answer_is_superseded(log: Log) -> None:
    log.follower.requests.open("c", "first")
    log.follower.requests.attach("c")
    assert log.state("c", 8, attachment="other.2", overtaken=("first",)) == [Superseded("c")]


def test_a_look_up_that_was_overtaken_is_superseded(log: Log) -> None:
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


def test_a_look_up_is_answered_once(log: Log) -> None:
    log.follower.requests.look_up("c", "look")
    assert log.state("c", 5, [9], attachment="other") == []
    [joined] = log.state("c", 6, [10, 11], attachment="look")
    assert isinstance(joined, Attached)
    assert (joined.outputs, joined.finish_reasons) == (((10, 11),), ("",))
    assert log.state("c", 6, [10, 11], attachment="look") == []


@pytest.mark.parametrize(
    ("reason", "may_be_elsewhere"),
    [("unknown", True), ("released", True), ("error", False), ("abort", False)],
)
def test_a_look_up_of_what_the_engine_has_forgotten_is_answered(
    log: Log, reason: str, may_be_elsewhere: bool
) -> None:
    log.follower.requests.look_up("c", "look")
    found = log.append(RequestEnded("c", reason, "", "1-1"))
    assert found == [UnknownRequest("c", may_be_elsewhere)]
    assert not log.follower.requests.awaits("c")
