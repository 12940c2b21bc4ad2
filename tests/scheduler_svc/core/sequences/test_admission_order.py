"""Admission by rank, of preempted and new requests alike; no request waits for ever."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core import events
from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.messages.requests import Stop, Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.scheduler_svc.core.blocks.test_pinned_prefixes import BLOCK_SIZE, Engine
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

NUM_SLOTS = 8
WINDOW = 20  # steps
LONGEST = 12  # generated tokens


def engine(num_blocks: int = 400, max_passing_steps: int = WINDOW) -> Engine:
    found = Engine()
    found.core = Scheduler(
        SchedulerConfig(
            *(num_blocks, BLOCK_SIZE, 128, NUM_SLOTS, 64, 2, 0, 1_000),
            preemption=Preemption.RECOMPUTE,
            max_passing_steps=max_passing_steps,
        )
    )
    found.worker = FakeWorker(BLOCK_SIZE, 64, lambda handle, position: (position % 97, False))
    return found


def small(number: int, max_tokens: int = LONGEST) -> Submit:
    return submit(f"small-{number}", [number, 5], max_tokens=max_tokens)


def wide(name: str = "wide", slots: int = NUM_SLOTS, priority: int = 0) -> Submit:
    return submit(name, [7, 8], num_choices=slots, priority=priority, max_tokens=LONGEST)


def admitted(found: Engine) -> list[str]:
    """Requests in the order of their first admission."""
    return list(found.cached)


# --------------------------------------------------------------------------- ranks


def test_an_urgent_request_does_not_wait_for_a_preempted_one() -> None:
    """The preempted one needs more than is free, and will for long."""
    found = engine(num_blocks=30)
    found.give(submit("first", range(40), max_tokens=60))  # 10 blocks, to 25 in the end
    found.give(submit("large", range(100, 152), max_tokens=30))  # 13 blocks, and more
    while not any(isinstance(event, events.Preempted) for event in found.events):
        assert found.turn()
    before = found.core.planned_step
    assert found.core.stats().num_used_blocks < 25
    found.give(submit("urgent", range(200, 210), max_tokens=4, priority=-1))
    while "urgent" not in found.ended():
        assert found.turn()
    assert found.core.planned_step - before <= 10
    found.run()
    assert found.ended() == {"first", "large", "urgent"}


def test_slots_of_a_preempted_group_are_free_for_a_more_urgent_request() -> None:
    """Whenever it comes, it is not passed although it needs some of those slots."""
    num_seen = 0
    for turns in range(1, 60):
        found = engine(num_blocks=60)
        found.give(submit("first", range(40), max_tokens=30))
        found.give(submit("group", range(100, 140), num_choices=6, max_tokens=28))
        for _ in range(turns):
            found.turn()
        if "group" in found.ended():
            break
        num_before = len(found.events)
        found.give(submit("urgent", [1, 2], num_choices=3, max_tokens=4, priority=-1))
        found.run()
        order = [n.request_id for n in found.events[num_before:] if isinstance(n, events.Admitted)]
        assert order[0] == "urgent", turns
        num_seen += "group" in order  # it was preempted, and waited then
    assert num_seen


def test_what_is_not_more_urgent_waits_for_a_preempted_one() -> None:
    found = engine(num_blocks=30)
    found.give(submit("first", range(40), max_tokens=60))
    found.give(submit("large", range(100, 152), max_tokens=30))
    while not any(isinstance(event, events.Preempted) for event in found.events):
        assert found.turn()
    found.give(submit("later", range(200, 210), max_tokens=4))
    found.run()
    again = [event for event in found.events if isinstance(event, events.Admitted)]
    assert [event.request_id for event in again[-2:]] == ["large", "later"]


# ------------------------------------------------------------------------ backfill


def test_others_go_on_while_a_wide_request_waits_and_it_has_its_turn_all_the_same() -> None:
    found = engine()
    found.give(*map(small, range(4)), wide())
    number = 100
    while "wide" not in found.cached:
        found.give(small(number))  # some request could always take a slot
        number += 1
        assert found.turn()
        # It came first at the first step; behind the window, what runs ends within its length.
        assert found.core.planned_step <= WINDOW + LONGEST + 4
    passed = admitted(found).index("wide") - 4
    assert passed > NUM_SLOTS
    found.run()


def test_no_request_passes_where_the_operator_allows_no_steps() -> None:
    found = engine(max_passing_steps=0)
    found.give(*map(small, range(4)), wide(), small(5))
    found.run()
    assert admitted(found)[-2:] == ["wide", "small-5"]


def test_beams_are_as_wide_as_they_may_become() -> None:
    found = engine()
    beams = BeamParams(NUM_SLOTS, 1.0, EarlyStopping.AT_ONCE)
    found.give(
        small(1),
        submit("beams", [7, 8], num_choices=NUM_SLOTS, beams=beams, max_tokens=4),
        small(2),
    )
    found.run()
    assert admitted(found) == ["small-1", "small-2", "beams"]


def test_a_narrower_group_passes_wider_ones_and_each_of_these_has_a_window() -> None:
    found = engine()
    found.give(small(1), wide("a"), wide("b"), wide("half", slots=4), small(2))
    found.run()
    assert admitted(found) == ["small-1", "half", "small-2", "a", "b"]


def test_a_less_urgent_request_passes_no_other() -> None:
    found = engine()
    found.give(small(1))
    found.turn()
    found.give(wide(priority=-1), small(2))
    found.run()
    assert admitted(found) == ["small-1", "wide", "small-2"]


def test_a_request_that_was_passed_long_enough_is_not_passed_again() -> None:
    """A more urgent wide one came between."""
    found = engine()
    found.give(small(1, max_tokens=100), wide("patient"))
    for number in range(WINDOW + 5):
        found.give(small(100 + number))
        found.turn()
    found.give(wide("urgent", priority=-1))
    found.run()
    order = admitted(found)
    behind = order[order.index("urgent") + 1 :]
    assert behind[0] == "patient"


def test_a_group_is_as_wide_as_its_sequences_that_have_not_ended() -> None:
    found = engine()
    found.give(small(1, max_tokens=60))
    known = wide("recovered")
    found.core.recover(known, {choice: np.array([1], np.int32) for choice in range(NUM_SLOTS)}, {})
    found.turn()
    assert "recovered" not in found.cached
    found.give(Stop("recovered", 3, 1))
    while "recovered" not in found.cached:
        assert found.turn()
    assert "small-1" not in found.ended()


@given(
    requests=st.lists(
        st.tuples(st.integers(1, NUM_SLOTS), st.integers(1, LONGEST), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    window=st.sampled_from([0, 1, 5, WINDOW]),
)
@settings(max_examples=40, deadline=None)
def test_no_request_waits_longer_than_those_before_it_take(
    requests: list[tuple[int, int, int]], window: int
) -> None:
    """However many come behind it: its turn depends on what came before it alone."""
    found = engine(max_passing_steps=window)
    bound = 0
    bounds: dict[str, int] = {}
    for number, (slots, max_tokens, num_turns) in enumerate(requests):
        name = f"r{number}"
        found.give(submit(name, [number, 5], num_choices=slots, max_tokens=max_tokens))
        # At the worst, each of those before has its window and then the engine for itself.
        bound += window + LONGEST + 4
        bounds[name] = found.core.planned_step + bound
        for _ in range(num_turns):
            _turn(found, bounds)
    for number in range(3 * (window + LONGEST)):
        found.give(small(number))
        _turn(found, bounds)
    found.run()
    assert set(bounds) <= found.ended()


def _turn(found: Engine, bounds: dict[str, int]) -> None:
    found.turn()
    step = found.core.planned_step
    late = [name for name, bound in bounds.items() if name not in found.cached and step > bound]
    assert not late, f"{late} still wait at step {step}"
