"""The phases of requests, from the outputs log."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.engine.outputs_follower import OutputsFollower
from gateway.tracing.phases import PhaseSpan, PhaseTracker
from shared.messages.endings import EndFlag
from shared.messages.outputs import RequestEnded
from tests.gateway.engine.outputs_log import AGAIN, ATTACHMENT, Log, several
from tests.support.requests import submit

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, DROPPED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class TracedLog(Log):
    """A log whose reader follows phases, at times that tests set."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.spans: list[PhaseSpan] = []
        self.tracker = PhaseTracker(
            "engine-0", "demo", self.spans.append, lambda: 1_000 * self.now_us
        )
        self.follower = OutputsFollower(self.tracker)
        self.start(1)

    def open(self, request_id: str = "a", num_choices: int = 1, traceparent: str = SAMPLED) -> None:
        self.follower.requests.open(request_id, ATTACHMENT, num_choices)
        asked = replace(submit(request_id, num_choices=num_choices), traceparent=traceparent)
        self.tracker.open(asked, is_known=False)

    def at(self, now_us: int) -> "TracedLog":
        self.now_us = now_us
        return self

    def phases(self) -> list[tuple[str, int, int]]:
        """Name, start and end in us, of all phases that are over."""
        return [
            (span.phase.value, span.start_ns // 1_000, span.end_ns // 1_000) for span in self.spans
        ]


@pytest.fixture
def log() -> TracedLog:
    return TracedLog()


def test_a_request_is_queued_prefilled_and_decoded(log: TracedLog) -> None:
    log.at(100).open()
    log.at(150).state("a", 9)
    log.at(300).step({}, admitted={9: 32}, step_us=50)
    log.at(400).step({9: 5}, step_us=80)
    log.at(500).step({9: 6}, ended={9: EndFlag.LENGTH}, step_us=80)
    assert log.phases() == [("queue", 100, 250), ("prefill", 250, 400), ("decode", 400, 500)]
    assert [span.facts for span in log.spans] == [
        {},
        {"cached_tokens": 32, "again": False},
        {"tokens": 2},
    ]
    assert {span.request_id for span in log.spans} == {"a"}
    assert {str(span.parent) for span in log.spans} == {SAMPLED}


def test_one_step_may_be_all_of_a_request(log: TracedLog) -> None:
    log.open()
    log.state("a", 9)
    log.at(300).step({9: 5}, ended={9: EndFlag.LENGTH}, admitted={9: 0}, step_us=100)
    assert log.phases() == [("queue", 0, 200), ("prefill", 200, 300), ("decode", 300, 300)]


def test_a_sequence_without_a_row_is_preempted(log: TracedLog) -> None:
    log.open("a")
    log.open("b")
    log.state("a", 9)
    log.state("b", 10)
    log.at(100).step({9: 5, 10: 5}, admitted={9: 0, 10: 0}, step_us=100)
    log.at(200).step({9: 6}, step_us=50)
    log.at(300).step({9: 6}, step_us=50)
    log.at(400).step({9: 7, 10: 8}, admitted={10: 16}, step_us=90)
    log.at(500).step({9: 7, 10: 8}, ended={9: EndFlag.LENGTH, 10: EndFlag.LENGTH})
    assert [span.phase for span in log.spans if span.request_id == "a"] == [
        "queue",
        "prefill",
        "decode",
    ]
    log.spans = [span for span in log.spans if span.request_id == "b"]
    assert log.phases()[2:] == [
        ("decode", 100, 150),
        ("preempted", 150, 310),
        ("prefill", 310, 400),
        ("decode", 400, 500),
    ]
    assert log.spans[4].facts == {"cached_tokens": 16, "again": True}


def test_a_second_admission_in_a_prefill_ends_it(log: TracedLog) -> None:
    log.open()
    log.state("a", 9)
    log.at(100).step({}, admitted={9: 0})
    log.at(200).step({}, admitted={9: 16})
    log.at(300).step({9: 1}, ended={9: EndFlag.LENGTH})
    assert log.phases()[1:3] == [("prefill", 100, 200), ("prefill", 200, 300)]


def test_choices_are_admitted_and_end_together(log: TracedLog) -> None:
    log.open(num_choices=2)
    several(log, (0, 20, [], ""), (1, 21, [], ""))
    log.at(100).step({20: 5, 21: 6}, admitted={20: 0, 21: 0})
    log.at(200).step({20: 5, 21: 6}, ended={20: EndFlag.LENGTH})
    log.at(300).step({21: 6}, ended={21: EndFlag.LENGTH})
    assert log.phases()[1:] == [("prefill", 100, 100), ("decode", 100, 300)]
    assert log.spans[-1].facts == {"tokens": 5}


def test_after_a_failure_a_request_is_recovered_from_its_last_result_on(log: TracedLog) -> None:
    log.open("a")
    log.open("waits")
    log.state("a", 9)
    log.state("waits", 10)
    log.at(100).step({9: 5}, admitted={9: 0})
    log.at(9_000).start(2)
    log.at(9_100).state("a", 3, [5])
    log.state("waits", 4)
    log.at(9_300).step({3: 6}, admitted={3: 0}, step_us=100)
    log.at(9_400).step({3: 6, 4: 1}, ended={3: EndFlag.LENGTH}, admitted={4: 0}, step_us=40)
    assert log.phases() == [
        ("queue", 0, 100),
        ("prefill", 100, 100),
        ("decode", 100, 100),
        ("recovered", 100, 9_200),
        ("prefill", 9_200, 9_300),
        ("queue", 0, 9_360),
        ("prefill", 9_360, 9_400),
        ("decode", 9_300, 9_400),
    ]


def test_a_reader_that_missed_results_attaches_and_goes_on(log: TracedLog) -> None:
    log.open()
    log.state("a", 9)
    log.at(100).step({9: 5}, admitted={9: 0})
    log.at(300).step({9: 5}, number=7)
    log.follower.requests.attach("a")
    log.at(400).state("a", 9, [5, 6], attachment=AGAIN)
    log.at(500).step({9: 7}, ended={9: EndFlag.LENGTH}, step_us=10)
    assert log.phases()[2:] == [("decode", 100, 100), ("recovered", 100, 490), ("decode", 490, 500)]


def test_what_another_gateway_accepted_begins_as_recovered(log: TracedLog) -> None:
    asked = replace(submit("a"), traceparent=SAMPLED)
    log.tracker.open(asked, is_known=True)
    log.at(50).tracker.close("a")
    assert log.phases() == [("recovered", 0, 50)]


def test_a_request_that_fails_ends_with_the_error(log: TracedLog) -> None:
    log.open()
    log.at(70).append(RequestEnded("a", "overloaded", "the queue is full", "3-4"))
    assert log.phases() == [("queue", 0, 70)]
    assert log.spans[0].error == "the queue is full"


def test_a_client_that_leaves_ends_the_phase(log: TracedLog) -> None:
    log.open()
    log.state("a", 9)
    log.at(100).step({9: 5}, admitted={9: 0})
    log.at(130).tracker.close("a")
    log.tracker.close("a")
    assert log.phases()[-1] == ("decode", 100, 130)


@pytest.mark.parametrize("traceparent", ["", DROPPED, "garbage"])
def test_a_request_that_is_not_sampled_has_no_spans(log: TracedLog, traceparent: str) -> None:
    log.open(traceparent=traceparent)
    log.state("a", 9)
    log.step({9: 5}, admitted={9: 0}, ended={9: EndFlag.LENGTH})
    spans: Sequence[PhaseSpan] = log.spans
    assert not spans


def test_a_clock_that_goes_back_makes_no_negative_time(log: TracedLog) -> None:
    log.at(1_000).open()
    log.state("a", 9)
    log.at(500).step({9: 5}, admitted={9: 0}, ended={9: EndFlag.LENGTH})
    assert log.phases() == [
        ("queue", 1_000, 1_000),
        ("prefill", 1_000, 1_000),
        ("decode", 1_000, 1_000),
    ]
