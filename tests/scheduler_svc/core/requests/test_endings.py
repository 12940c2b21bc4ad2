"""Aborts, lost gateways, deadlines, and what is left of ended requests."""

from dataclasses import replace

import pytest

from scheduler_svc.core import events
from shared.bus.api import EntryId
from shared.messages.outputs import RequestEnded, RequestState
from shared.messages.requests import Abort, GatewayLost
from shared.sampling import BeamParams, EarlyStopping
from tests.support.logged_core import REQUEST, LoggedCore, attach, expected, view
from tests.support.requests import submit


def test_an_abort_of_an_earlier_delivery_is_ignored() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.apply(attach(REQUEST))
    assert engine.apply(Abort("r", "attachment", "gone")) == []
    [answer] = engine.apply(Abort("r", "second", "gone"))
    assert isinstance(answer, RequestEnded)


def test_a_request_that_ended_before_its_first_result_has_no_first_token() -> None:
    """Observers drop what they know of a request when it ends."""
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.plan()
    engine.apply(Abort("r", "attachment", "gone"))
    engine.apply(engine.worker.execute(engine.plans.popleft()))
    found = [type(event) for event in engine.core.take_events()]
    assert found == [events.Accepted, events.Admitted, events.Ended]


def test_an_abort_that_overtakes_its_request_ends_it() -> None:
    engine = LoggedCore()
    assert engine.apply(Abort("r", "attachment", "gone")) == []
    [answer] = engine.apply(REQUEST)
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "abort"
    [state] = engine.apply(attach(REQUEST))
    assert isinstance(state, RequestState), "another delivery starts it again"


def test_an_abort_is_remembered_by_the_clock_of_the_log() -> None:
    """No plan may have been made for a long time."""
    core = LoggedCore(resume_window_ms=60_000).core
    core.schedule(5_000)
    core.apply(Abort("early", "attachment", "gone"), EntryId(900_000, 0))
    core.apply(Abort("late", "attachment", "gone"), EntryId(900_000, 1))
    core.schedule(900_001)
    [answer] = core.apply(submit("early", [1, 2, 3]), EntryId(959_999, 0))
    assert isinstance(answer, RequestEnded)
    [answer] = core.apply(submit("late", [1, 2, 3]), EntryId(960_000, 0))
    assert isinstance(answer, RequestState)


def test_requests_of_a_lost_gateway_end_unless_another_delivers_them() -> None:
    engine = LoggedCore()
    moved = submit("moved", range(3), max_tokens=9)
    engine.apply(REQUEST)
    engine.apply(moved)
    engine.apply(attach(moved))
    [answer] = engine.apply(GatewayLost("gateway"))
    assert isinstance(answer, RequestEnded)
    assert answer.request_id == "r"
    engine.run()
    assert engine.outputs("moved") == {0: expected(3, 9)}


def test_a_deadline_ends_a_request_and_frees_its_blocks() -> None:
    engine = LoggedCore()
    request = submit("r", range(5), num_choices=2, max_tokens=12)
    object.__setattr__(request, "deadline_ms", 5_000)
    engine.apply(request)
    engine.step(3)
    engine.apply(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=5_999)  # the epoch began at 1,000
    assert engine.core.pool.num_used > 0
    engine.apply(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=6_000)
    ended = engine.log[-1]
    assert isinstance(ended, RequestEnded)
    assert (ended.reason, ended.error) == ("deadline", "its deadline has passed")
    assert engine.core.pool.num_used == 0
    assert engine.outputs("r") == {0: expected(5, 5), 1: expected(5, 5)}


def test_a_request_that_waits_too_long_ends_but_not_one_that_was_admitted() -> None:
    engine = LoggedCore(num_blocks=8, queue_ttl_ms=1_000)
    engine.apply(submit("served", range(5), max_tokens=25))
    engine.step(2)
    engine.apply(submit("waits", range(5), max_tokens=20))
    engine.plan(now_ms=1_999)  # the epoch began at 1,000
    result = engine.worker.execute(engine.plans.popleft())
    engine.apply(result)
    engine.plan(now_ms=2_000)
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert [(found.request_id, found.reason) for found in ended] == [("waits", "deadline")]
    engine.run()
    assert engine.outputs("served") == {0: expected(5, 25)}


@pytest.mark.parametrize("skew_ms", [-3_600_000, 0, 3_600_000])
def test_time_limits_hold_by_the_engines_clock_whatever_the_gateways_clocks_show(
    skew_ms: int,
) -> None:
    """Also across epochs: they do not start again."""
    engine = LoggedCore(queue_ttl_ms=2_000, num_blocks=8)
    slow = submit("slow", range(5), received_ms=5_000_000 + skew_ms, max_tokens=25)
    object.__setattr__(slow, "deadline_ms", slow.received_ms + 5_000)
    engine.apply(slow)
    engine.step(1)
    engine.apply(submit("waits", range(100, 125), received_ms=5_000_000 + skew_ms, max_tokens=5))
    engine.start_epoch()  # at 2,000; both were accepted at 1,000
    for now_ms, over in ((2_999, []), (3_000, ["waits"]), (5_999, ["waits"])):
        engine.plan(now_ms=now_ms)
        assert _over_deadline(engine) == over, f"at {now_ms}"
        engine.apply(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=6_000)
    assert _over_deadline(engine) == ["waits", "slow"]


def _over_deadline(engine: LoggedCore) -> list[str]:
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert {found.reason for found in ended} <= {"deadline"}
    return [found.request_id for found in ended]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_request_that_was_accepted_before_has_no_time_limit_in_the_queue(
    is_known: bool, exact: bool
) -> None:
    engine = LoggedCore(queue_ttl_ms=100)
    if is_known:
        engine.apply(REQUEST)
        engine.run()
    engine.apply(attach(REQUEST, view(), exact=exact))
    engine.plan(now_ms=1_000)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_a_new_request_has_a_time_limit_in_the_queue() -> None:
    engine = LoggedCore(queue_ttl_ms=100)
    engine.apply(replace(attach(REQUEST, view()), is_new=True))
    engine.plan(now_ms=1_100)  # the epoch began at 1,000
    assert not engine.plans
    [ended] = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert ended.reason == "deadline"


def test_a_request_that_was_admitted_in_an_earlier_epoch_has_no_time_limit_in_the_queue() -> None:
    engine = LoggedCore(queue_ttl_ms=1_000)
    engine.apply(submit("served", range(5), max_tokens=12))
    engine.step(2)
    engine.apply(submit("waits", range(5), max_tokens=12))
    engine.start_epoch()
    engine.plan(now_ms=1_000)
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert [(found.request_id, found.reason) for found in ended] == [("waits", "deadline")]
    engine.run()
    assert engine.outputs("served") == {0: expected(5, 12)}


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("is_suspect", [True, False])
def test_a_request_that_only_prefilled_in_an_earlier_epoch_has_no_time_limit_in_the_queue(
    num_epochs: int, is_suspect: bool
) -> None:
    engine = LoggedCore(queue_ttl_ms=1_000)
    [state] = engine.apply(submit("served", range(130), max_tokens=3))
    assert isinstance(state, RequestState)
    engine.plan()
    if not is_suspect:
        engine.apply(engine.worker.execute(engine.plans.popleft()))
    engine.start_epoch([state.choices[0].handle] if is_suspect else [])
    for _ in range(num_epochs - 1):
        engine.start_epoch()
    engine.plan(now_ms=10_000)
    assert not [message for message in engine.log if isinstance(message, RequestEnded)]
    engine.run()
    assert engine.outputs("served") == {0: expected(130, 3)}


def test_a_request_past_both_of_its_time_limits_ends_once() -> None:
    engine = LoggedCore(queue_ttl_ms=1_000)
    now_ms = 1_000  # when the epoch began
    beams = BeamParams(2, 1.0, EarlyStopping.NEVER)
    for name, request in (
        ("beams", submit("beams", range(5), num_choices=2, max_tokens=4, beams=beams)),
        ("choices", submit("choices", range(5), num_choices=2, max_tokens=4)),
    ):
        object.__setattr__(request, "deadline_ms", 900)
        engine.apply(request)
        now_ms += 1_000
        engine.plan(now_ms)
        ended = [message for message in engine.log if isinstance(message, RequestEnded)]
        assert [found.request_id for found in ended].count(name) == 1
    assert not engine.core.num_requests


def test_deadlines_of_ended_requests_are_dropped() -> None:
    engine = LoggedCore()
    for number in range(3_000):
        request = submit(f"r{number}", range(5))
        object.__setattr__(request, "deadline_ms", 10**15)
        engine.apply(request)
        engine.apply(Abort(request.request_id, "attachment", "gone"))
    assert len(engine.core._requests._deadlines._due) <= 1_024


def test_ended_requests_leave_calendar_and_waiting_queue() -> None:
    engine = LoggedCore()
    engine.apply(submit("long", [1, 2, 3], max_tokens=150))
    engine.step()
    calendar = engine.core._planner._reaches_limit
    assert len(calendar) == 1
    engine.apply(Abort("long", "attachment", "gone"))
    assert len(calendar) == 0
    for number in range(5_000):
        engine.apply(submit(f"waits{number}", [1, 2, 3]))
        engine.apply(Abort(f"waits{number}", "attachment", "gone"))
    assert len(engine.core._planner.queues._waiting) <= 1_024
