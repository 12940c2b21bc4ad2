"""Pinned prefixes stay in the pool, and no request waits for ever because of them."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core import events as core_events
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.leases import PrefixState
from shared.messages.plans import StepPlan
from shared.messages.requests import Abort, Pin, Submit
from tests.support.fake_worker import FakeWorker
from tests.support.requests import pin, submit

BLOCK_SIZE = 4
NUM_BLOCKS = 20
PREFIX = range(100, 116)  # four blocks


def draw(handle: int, position: int) -> tuple[int, bool]:
    return (handle * 31 + position * 17) % 97, False


class Engine:
    """A scheduler whose plans are executed as soon as nothing more can be planned."""

    def __init__(
        self, num_blocks: int = NUM_BLOCKS, max_pinned: int | None = None, budget: int = 24
    ) -> None:
        max_pinned = num_blocks // 2 if max_pinned is None else max_pinned
        self.core = Scheduler(
            SchedulerConfig(
                num_blocks, BLOCK_SIZE, 128, 8, budget, 2, 0, 1_000, max_pinned_blocks=max_pinned
            )
        )
        self.worker = FakeWorker(BLOCK_SIZE, budget, draw)
        self.plans: deque[StepPlan] = deque()
        self.events: list[core_events.Event] = []
        self.cached: dict[str, int] = {}  # tokens that a request found when it was first admitted
        self._num_entries = 0

    def give(self, *messages: Message) -> list[Message]:
        answers: list[Message] = []
        for message in messages:
            self._num_entries += 1
            answers += self.core.apply(message, EntryId(1, self._num_entries))
        return answers

    def turn(self) -> bool:
        """Plan all that can be planned and execute one plan; whether there was one."""
        while (plan := self.core.schedule(0)) is not None:
            self.plans.append(plan)
        self._take_events()
        if not self.plans:
            return False
        self.give(self.worker.execute(self.plans.popleft()))
        self._take_events()
        return True

    def run(self, *messages: Message) -> None:
        """Until everything has ended."""
        self.give(*messages)
        for _ in range(5_000):
            if not self.turn():
                return
        raise AssertionError("it does not end")

    def ended(self) -> set[str]:
        return {event.request_id for event in self.events if isinstance(event, core_events.Ended)}

    def given_up(self) -> list[str]:
        return [
            event.prefix_id for event in self.events if isinstance(event, core_events.PrefixGivenUp)
        ]

    def states(self) -> dict[str, str]:
        return {found.prefix_id: found.state for found in self.core.prefixes()}

    def _take_events(self) -> None:
        taken = self.core.take_events()
        self.events += taken
        for event in taken:
            if isinstance(event, core_events.Admitted):
                self.cached.setdefault(event.request_id, event.num_reused)


def flood(count: int, first: int = 0, length: int = 30) -> list[Submit]:
    """Requests that begin differently and together need far more than the pool."""
    return [
        submit(f"flood-{first + n}", range(1_000 * (first + n), 1_000 * (first + n) + length))
        for n in range(count)
    ]


def asking(request_id: str, prefix: Sequence[int] = PREFIX, **changes: str) -> Submit:
    return submit(request_id, [*prefix, 7, 8, 9], max_tokens=5, **changes)


def test_a_pinned_prefix_is_there_for_the_first_request_and_after_any_flood() -> None:
    engine = Engine()
    engine.run(pin("a", PREFIX))
    assert engine.states() == {"a": PrefixState.PINNED}
    engine.run(asking("first"))
    engine.run(*flood(30))
    engine.run(asking("last"))
    assert engine.cached["first"] == engine.cached["last"] == len(PREFIX)
    assert engine.given_up() == []


def test_without_a_pin_the_same_flood_evicts_the_prefix() -> None:
    engine = Engine()
    engine.run(asking("first"))
    engine.run(*flood(30))
    engine.run(asking("last"))
    assert engine.cached["last"] == 0


def test_a_pin_outlives_the_flood_even_if_nothing_else_is_cached() -> None:
    config = SchedulerConfig(
        NUM_BLOCKS, BLOCK_SIZE, 128, 8, 24, 2, 0, 1_000, prefix_caching=False, max_pinned_blocks=10
    )
    engine = Engine()
    engine.core = Scheduler(config)
    engine.run(pin("a", PREFIX))
    engine.run(*flood(5), asking("asking"))
    assert engine.cached["asking"] == len(PREFIX)
    engine.run(asking("again", range(50, 66)))
    engine.run(asking("once more", range(50, 66)))
    assert engine.cached["once more"] == 0


def test_only_full_blocks_are_pinned_and_no_message_is_written() -> None:
    engine = Engine()
    assert engine.give(pin("a", [*PREFIX, 1, 2])) == []
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_pinned_blocks, stats.num_pinned_prefixes) == (4, 1)
    assert (stats.num_used_blocks, stats.num_kv_tokens, stats.num_shared_blocks) == (0, 0, 0)
    assert [type(event) for event in engine.events] == [core_events.PrefixPinned]


def test_blocks_that_requests_use_are_not_counted_twice() -> None:
    engine = Engine()
    engine.run(pin("a", PREFIX))
    engine.give(asking("one"), asking("two"))
    engine.turn()
    stats = engine.core.stats()
    # Four blocks of the prefix, and one of each request's own.
    assert (stats.num_used_blocks, stats.num_shared_blocks) == (6, 4)
    assert (stats.num_pinned_blocks, stats.num_pinned_unused_blocks) == (4, 0)


def test_a_repeated_pin_has_no_effect() -> None:
    engine = Engine()
    engine.give(pin("a", PREFIX), pin("a", PREFIX))
    engine.run(pin("a", PREFIX))
    assert engine.worker.num_computed == len(PREFIX)
    assert engine.core.pool.num_pinned == 4


def test_prefixes_that_begin_alike_share_blocks_and_need_less_of_the_limit() -> None:
    engine = Engine(max_pinned=6)
    longer = [*PREFIX, *range(8)]
    engine.run(pin("long", longer), pin("short", PREFIX))
    assert set(engine.states().values()) == {PrefixState.PINNED}
    assert engine.core.pool.num_pinned == 6
    # A request leaves a token to compute, though its last block be known.
    assert engine.worker.num_computed == len(longer) + BLOCK_SIZE


def test_what_is_cached_already_is_pinned_without_computing() -> None:
    engine = Engine()
    engine.run(asking("first"))
    computed = engine.worker.num_computed
    engine.run(pin("a", PREFIX))
    assert engine.states() == {"a": PrefixState.PINNED}
    assert engine.worker.num_computed == computed
    engine.run(*flood(30))
    engine.run(asking("last"))
    assert engine.cached["last"] == len(PREFIX)


def test_another_salt_does_not_find_it() -> None:
    engine = Engine()
    engine.run(pin("a", PREFIX, cache_salt="ours"))
    engine.run(asking("theirs"))
    engine.run(asking("ours", cache_salt="ours"))
    assert (engine.cached["theirs"], engine.cached["ours"]) == (0, len(PREFIX))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (range(BLOCK_SIZE - 1), ["3 tokens", "blocks of 4"]),
        (range(11 * BLOCK_SIZE), ["11 blocks", "15 would be pinned", "10 of the pool's 20"]),
        (range(128), ["128 tokens", "context is 128"]),
    ],
)
def test_a_prefix_that_cannot_be_pinned_is_refused_with_the_numbers(
    tokens: Sequence[int], words: list[str]
) -> None:
    engine = Engine()
    engine.run(pin("good", PREFIX), pin("bad", tokens), pin("bad", tokens))
    assert engine.states() == {"good": PrefixState.PINNED, "bad": PrefixState.REFUSED}
    [refused] = [event for event in engine.events if isinstance(event, core_events.PrefixRefused)]
    assert all(word in refused.reason for word in words), refused.reason
    assert engine.core.pool.num_pinned == 4


def test_clients_go_first_and_requests_with_the_prefix_pin_it() -> None:
    engine = Engine()
    more = iter(flood(200))

    def until_ended(request: Submit) -> None:
        engine.give(request)
        while request.request_id not in engine.ended():
            while engine.core.stats().num_waiting < 3:  # some requests always wait
                engine.give(next(more))
            assert engine.turn()

    until_ended(next(more))
    engine.give(pin("a", PREFIX))
    until_ended(asking("asking"))
    assert engine.states() == {"a": PrefixState.PENDING}
    until_ended(next(more))
    until_ended(asking("again"))
    assert (engine.cached["asking"], engine.cached["again"]) == (0, len(PREFIX))
    engine.run()
    assert engine.states() == {"a": PrefixState.PINNED}


def test_a_prefix_that_is_being_computed_makes_way_and_is_computed_later() -> None:
    num_made_way = 0
    for num_turns in range(1, 12):
        engine = Engine(num_blocks=12, budget=8)
        engine.give(submit("grows", range(20), max_tokens=9))  # to seven blocks
        for _ in range(num_turns):
            engine.turn()
        engine.run(pin("a", range(200, 224)))
        assert engine.ended() == {"grows"}
        assert not any(isinstance(event, core_events.Preempted) for event in engine.events)
        if engine.given_up():
            continue  # it had been computed already, and 7 + 6 blocks do not fit
        assert engine.states() == {"a": PrefixState.PINNED}
        assert engine.core.pool.num_used == engine.core.pool.num_pinned == 6
        num_made_way += engine.worker.num_computed > 28 + 24
    assert num_made_way > 0


def test_a_request_that_needs_the_whole_pool_gets_it_and_least_used_prefixes_go_first() -> None:
    engine = Engine()
    prefixes = {name: range(first, first + 12) for name, first in (("a", 100), ("b", 200))}
    prefixes["c"] = range(300, 312)
    engine.run(*(pin(name, tokens) for name, tokens in prefixes.items()))
    engine.run(asking("uses b", prefixes["b"]), asking("uses a", prefixes["a"]))
    engine.run(submit("large", range(50), max_tokens=13))  # 16 of 20 blocks, 9 are pinned
    assert "large" in engine.ended()
    assert engine.given_up() == ["c", "b"]
    assert engine.states() == {"a": PrefixState.PINNED}
    # A gateway that misses them sends their Pins again.
    engine.run(pin("b", prefixes["b"]), pin("c", prefixes["c"]))
    assert set(engine.states().values()) == {PrefixState.PINNED}


def test_a_request_that_grows_beyond_what_is_free_gets_pinned_blocks() -> None:
    engine = Engine()
    engine.run(pin("a", PREFIX))
    engine.run(submit("grows", range(8), max_tokens=72))
    assert engine.ended() == {"grows"}
    assert engine.given_up() == ["a"]
    assert not any(isinstance(event, core_events.Preempted) for event in engine.events)
    assert engine.core.pool.num_used == 0


def test_others_are_preempted_before_prefixes_are_given_up() -> None:
    engine = Engine()
    engine.run(pin("a", PREFIX))
    requests = [submit(f"r{n}", range(1_000 * n, 1_000 * n + 12), max_tokens=40) for n in range(4)]
    engine.run(*requests)
    assert len(engine.ended()) == 4
    assert any(isinstance(event, core_events.Preempted) for event in engine.events)
    assert engine.given_up() == []


def test_an_abort_in_the_name_of_a_prefix_ends_nothing() -> None:
    engine = Engine()
    engine.give(pin("a", PREFIX))
    assert engine.give(Abort("a", "attachment", "gone")) == []
    engine.run()
    assert engine.states() == {"a": PrefixState.PINNED}


_EVENTS = st.lists(
    st.one_of(
        st.builds(
            lambda family, length: pin(f"{family}-{length}", range(family, family + length)),
            st.integers(0, 3),
            st.integers(1, 40),
        ),
        st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 30)),
        st.integers(1, 4),
    ),
    max_size=30,
)


@given(events=_EVENTS, num_blocks=st.integers(20, 30))
@settings(max_examples=150, deadline=None)
def test_what_is_pinned_is_never_evicted(
    events: list[Pin | tuple[int, int, int] | int], num_blocks: int
) -> None:
    engine = Engine(num_blocks=num_blocks)
    prefixes: dict[str, Pin] = {}
    num_requests = 0
    for event in events:
        if isinstance(event, Pin):
            engine.give(event)
            prefixes[event.prefix_id] = event
        elif isinstance(event, tuple):
            family, length, max_tokens = event
            prompt = range(family, family + length)
            engine.give(submit(f"r{num_requests}", prompt, max_tokens=max_tokens))
            num_requests += 1
        else:
            for _ in range(event):
                engine.turn()
    engine.run()
    assert len(engine.ended()) == num_requests
    assert engine.core.pool.num_used == engine.core.pool.num_pinned
    for prefix_id, state in engine.states().items():
        if state == PrefixState.PINNED:
            tokens: list[int] = np.append(prefixes[prefix_id].tokens, 5).tolist()
            engine.run(submit(f"asks for {prefix_id}", tokens, max_tokens=1))
            found = engine.cached[f"asks for {prefix_id}"]
            assert found == (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
