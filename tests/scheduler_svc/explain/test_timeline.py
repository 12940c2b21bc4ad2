"""Timelines from logs that were made by hand: what is certain, and what is logged not to be."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.explain.merged_logs import (
    Logs,
    Planned,
    RequestNotFound,
    resolve,
)
from scheduler_svc.explain.timeline import Kind
from shared.messages.outputs import (
    BeamsEnded,
    ChoiceEnded,
    Hypothesis,
    RequestEnded,
)
from shared.messages.plans import EpochStarted
from shared.messages.requests import Abort, Attach, ChoiceView, GatewayLost, Stop
from shared.sampling import BeamParams
from tests.scheduler_svc.explain.handmade_logs import (
    EPOCH,
    STARTED,
    asked,
    explained,
    ints,
    kinds,
    only,
    outputs,
    plan,
    result,
    state,
)
from tests.support.requests import submit


def test_a_request_without_incidents_has_a_short_timeline() -> None:
    asks = submit("a", [1, 2, 3, 4, 5])
    timeline = explained(
        Logs(
            requests=asked((EPOCH + 20, asks)),
            outputs=outputs(
                STARTED,
                state(asks, 1, requests_cursor=f"{EPOCH + 20}-0"),
                result(1, admitted={1: 4}),
                result(2, 1),
                result(3, 1, ended=[1]),
            ),
        )
    )
    assert kinds(timeline) == ["submitted", "accepted", "admitted", "first token", "ended"]
    assert "5 prompt tokens" in timeline.events[0].text
    assert "no request is ahead" in timeline.events[1].text
    assert (timeline.events[2].facts["num_reused"], timeline.events[2].facts["num_tokens"]) == (
        4,
        5,
    )
    assert timeline.events[3].facts["num_prefill_steps"] == 2
    assert (timeline.events[4].facts["reason"], timeline.events[4].facts["num_tokens"]) == (
        "stop",
        [2],
    )
    assert [event.when.at_ms - EPOCH for event in timeline.events] == [20, 20, 30, 40, 50]
    assert [event.when.is_estimate for event in timeline.events] == [False, True, True, True, True]
    assert timeline.status == "it has ended, 2 tokens generated"
    assert timeline.unknown == []


def test_the_trace_of_its_call_is_shown() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    asks = replace(submit("a"), traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    timeline = explained(Logs(requests=asked((EPOCH + 20, asks)), outputs=outputs(STARTED)))
    assert timeline.events[0].text.endswith(f", trace {trace}")
    assert timeline.events[0].facts["trace_id"] == trace


def test_no_token_and_no_prompt_is_ever_shown() -> None:
    asks = submit("a", [4711, 4712])
    timeline = explained(
        Logs(
            requests=asked(
                (1, asks),
                (2, Attach("a", "g2", "x", asks, (ChoiceView(ints(4713), ""),), exact=True)),
            ),
            outputs=outputs(STARTED, state(asks, 1, output=[4713]), result(1, 1, admitted={1: 0})),
        )
    )
    assert "471" not in repr(timeline)
    assert "999" not in repr(timeline)


def test_those_ahead_are_named_and_the_wait_is_measured() -> None:
    timeline = explained(
        Logs(
            outputs=outputs(
                STARTED,
                state("running", 1),
                state("earlier", 2),
                state(submit("urgent", priority=-1), 3),
                state(submit("later", priority=1), 4),
                result(1, 1, admitted={1: 0}),
                state(submit("a", received_ms=EPOCH), 5),
                result(2, 1),
                result(3, 1, 2, 3, 5, admitted={2: 0, 3: 0, 5: 0}),
            )
        )
    )
    accepted, admitted = only(timeline, Kind.ACCEPTED), only(timeline, Kind.ADMITTED)
    assert accepted.facts["waiting"] == ["earlier", "urgent"]
    assert accepted.facts["running"] == ["running"]
    assert admitted.facts["waited_ms"] == 20


def test_times_are_the_schedulers_where_plans_are_left() -> None:
    lives = outputs(STARTED, state("a", 1), result(1, 1, admitted={1: 0}), result(2, 1), result(3))
    plans = [
        Planned(EPOCH, plan(1, EPOCH + 700, f"{EPOCH}-1")),
        Planned(EPOCH, plan(2, EPOCH + 800, f"{EPOCH}-2")),
    ]
    first = only(explained(Logs(plans=plans, outputs=lives)), Kind.FIRST_TOKEN)
    assert (first.when.at_ms, first.when.is_estimate) == (EPOCH + 800, False)


def test_a_worker_dies_and_the_request_is_taken_over() -> None:
    lives = outputs(
        STARTED,
        state("a", 1),
        result(1, 1, admitted={1: 0}),
        result(2, 1),
        EpochStarted(EPOCH + 500, "s1", ("w2",), ints(1)),
        state("a", 8, output=[5, 6], num_deaths=1),
        result(1, 8, admitted={8: 3}),
        result(2, 8, ended=[8]),
    )
    timeline = explained(Logs(outputs=lives))
    assert kinds(timeline)[3:] == [
        *("first token", "new epoch", "taken over", "admitted again", "resumed", "ended")
    ]
    epoch = only(timeline, Kind.EPOCH)
    assert "worker w2 in place of w1" in epoch.text
    assert epoch.facts["suspect"]
    assert only(timeline, Kind.TAKEN_OVER).facts["num_deaths"] == 1
    assert only(timeline, Kind.ENDED).facts["num_tokens"] == [4]


def test_a_scheduler_dies() -> None:
    later = EpochStarted(EPOCH + 500, "s2", ("w1",))
    timeline = explained(Logs(outputs=outputs(STARTED, state("a", 1), later, state("a", 9))))
    assert "scheduler s2 in place of s1" in only(timeline, Kind.EPOCH).text


def test_a_request_moves_to_another_gateway_and_back_to_what_its_client_has() -> None:
    asks = submit("a")
    attach = Attach("a", "g2", "second", None, (ChoiceView(ints(5), ""),), exact=True)
    moved = replace(asks, gateway="g2", attachment="second")
    lives = outputs(
        STARTED,
        state(asks, 1, requests_cursor=f"{EPOCH + 1}-0"),
        result(1, 1, admitted={1: 0}),
        result(2, 1),
        state(moved, 4, output=[5], requests_cursor=f"{EPOCH + 9}-0"),
        result(3, 4, admitted={4: 0}),
    )
    requests = asked(
        (EPOCH + 1, asks), (EPOCH + 9, attach), (EPOCH + 20, Abort("a", "attachment", "gone"))
    )
    timeline = explained(Logs(requests=requests, outputs=lives))
    assert kinds(timeline) == [
        *("submitted", "accepted", "admitted", "first token", "attach", "rewound", "moved"),
        *("admitted again", "resumed", "abort"),
    ]
    rewound = only(timeline, Kind.REWOUND)
    assert rewound.facts["num_tokens_before"] == {"0": 2}
    assert rewound.facts["num_tokens"] == {"0": 1}
    assert only(timeline, Kind.ABORT).facts["stale"]


def test_an_attach_of_a_delivery_that_was_taken_over_has_no_effect() -> None:
    asks = submit("a")
    moved = replace(asks, gateway="g2", attachment="second", overtaken=(asks.attachment,))
    lives = outputs(
        STARTED,
        state(asks, 1, requests_cursor=f"{EPOCH + 1}-0"),
        result(1, 1, admitted={1: 0}),
        state(moved, 1, output=[5], requests_cursor=f"{EPOCH + 9}-0"),
        result(2, 1),
    )
    stale = Attach("a", "g1", f"{asks.attachment}.1", asks, (), exact=True)
    requests = asked((EPOCH + 1, asks), (EPOCH + 20, stale))
    timeline = explained(Logs(requests=requests, outputs=lives))
    assert "void, since another delivery has taken over" in only(timeline, Kind.ATTACH).text


def test_a_prompt_that_is_left_out_is_that_of_the_state_before() -> None:
    asks = submit("a", [1, 2, 3])
    moved = replace(asks, gateway="g2", attachment="second").without_prompt()
    attach = Attach("a", "g2", "second", moved, (), exact=False)
    lives = outputs(
        STARTED,
        state(asks, 1, requests_cursor=f"{EPOCH + 1}-0"),
        state(moved, 4, requests_cursor=f"{EPOCH + 9}-0"),
        result(1, 4, admitted={4: 1}),
    )
    logs = Logs(requests=asked((EPOCH + 1, asks), (EPOCH + 9, attach)), outputs=lives)
    timeline = explained(logs)
    assert only(timeline, Kind.ADMITTED).facts["num_tokens"] == 3
    assert "with the request" not in only(timeline, Kind.ATTACH).text
    trimmed = explained(Logs(outputs=[lives[0], *lives[2:]]))
    assert trimmed.events[0].facts["num_prompt_tokens"] == 3
    assert "3 prompt tokens" in trimmed.events[0].text


def test_a_restated_request_has_not_moved() -> None:
    lives = outputs(
        STARTED, state("a", 1), result(1, 1, admitted={1: 0}), state("a", 1, output=[7])
    )
    assert kinds(explained(Logs(outputs=lives)))[1:] == ["accepted", "admitted", "first token"]


def test_choices_end_each_in_its_way() -> None:
    asks = submit("a", num_choices=2)
    lives = outputs(
        STARTED,
        state(asks, 1, 2, requests_cursor=f"{EPOCH}-0"),
        result(1, 1, 2, admitted={1: 0}),
        result(2, 1, 2, ended=[2]),
        ChoiceEnded("a", 0, "stop", f"{EPOCH + 30}-0"),
    )
    requests = asked((EPOCH, asks), (EPOCH + 30, Stop("a", 0, 2)))
    timeline = explained(Logs(requests=requests, outputs=lives))
    assert kinds(timeline)[-4:] == ["choice ended", "stop", "choice ended", "ended"]


def test_a_beam_search() -> None:
    asks = submit("a", num_choices=2, beams=BeamParams(2, 1.0, "never"))
    found = Hypothesis(ints(1, 2), np.zeros(2, np.float32), 0.0, "stop")
    lives = outputs(
        STARTED,
        state(asks, 1),
        result(1, admitted={1: 0}, beams=[1]),
        result(2),
        result(3, beams=[1]),
        BeamsEnded("a", (found, found), "0-0"),
    )
    timeline = explained(Logs(outputs=lives))
    assert kinds(timeline)[1:] == ["accepted", "admitted", "first token", "ended"]
    assert "beam search of width 2" in timeline.events[0].text
    assert only(timeline, Kind.ENDED).facts["num_tokens"] == [2, 2]
    assert any("preemptions of a beam search" in what for what in timeline.unknown)


def test_a_request_whose_gateway_is_gone_is_ended() -> None:
    lives = outputs(STARTED, state("a", 1), RequestEnded("a", "abort", "", f"{EPOCH + 40}-0"))
    requests = asked((EPOCH + 30, GatewayLost("another")), (EPOCH + 40, GatewayLost("gateway")))
    timeline = explained(Logs(requests=requests, outputs=lives))
    assert kinds(timeline)[1:] == ["accepted", "gateway lost", "ended"]


def test_a_refused_request_has_the_reason() -> None:
    lives = outputs(STARTED, RequestEnded("a", "overloaded", "10 requests would wait", "0-0"))
    ended = only(explained(Logs(outputs=lives)), Kind.ENDED)
    assert ended.text == "ended: overloaded (10 requests would wait)"


def test_what_was_trimmed_is_not_made_up() -> None:
    lives = outputs(result(70, 1), state("a", 1, output=[1] * 30), result(71, 1), result(72, 1))
    timeline = explained(Logs(outputs=lives))
    assert kinds(timeline) == ["submitted", "seen"]
    assert "30 tokens" in only(timeline, Kind.SEEN).text
    assert timeline.status == "it is running, 32 tokens generated"
    assert any("first seen in outputs" in what for what in timeline.unknown)
    assert any("Submit" in what for what in timeline.unknown)


def test_a_gap_in_the_steps_is_logged_and_not_bridged() -> None:
    lives = outputs(
        STARTED,
        state("a", 1),
        result(1, 1, admitted={1: 0}),
        result(4, 1),
        result(5, 1),
        state("a", 1, output=[1] * 5),
        result(6, 1, ended=[1]),
    )
    timeline = explained(Logs(outputs=lives))
    assert kinds(timeline)[3:] == ["first token", "lost sight", "ended"]
    assert only(timeline, Kind.ENDED).facts["num_tokens"] == [6]


def test_a_missing_entry_is_reported_and_not_bridged() -> None:
    lives = outputs(
        STARTED, state("a", 1), result(1, 1, admitted={1: 0}), state("b", 2), result(2, 1)
    )
    timeline = explained(Logs(outputs=[*lives[:3], *lives[4:]]))
    assert kinds(timeline)[3:] == ["first token", "lost sight"]
    assert only(timeline, Kind.LOST_SIGHT).text.endswith("entries are missing in the log")


def test_the_beginning_of_an_id_is_enough_if_no_other_begins_so() -> None:
    logs = Logs(requests=asked((1, submit("abc")), (2, submit("abd")), (3, submit("ab"))))
    assert resolve("abc", logs) == "abc"
    assert resolve("abd", logs) == "abd"
    assert resolve("ab", logs) == "ab"
    with pytest.raises(RequestNotFound, match="3 requests begin with 'a'"):
        resolve("a", logs)
    with pytest.raises(RequestNotFound, match="nothing is known of a request 'x'"):
        resolve("x", logs)
