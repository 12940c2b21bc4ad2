"""Epochs of the scheduler's loop: when one ends, what the next continues, and which is given up."""

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest

from scheduler_svc.service import Superseded
from shared.bus.api import Append, Entry, EntryId
from shared.bus.memory import MemoryBus
from shared.codec import Message, encode
from shared.errors import BusUnavailable
from shared.messages.outputs import RequestState
from shared.messages.plans import EpochStarted
from tests.scheduler_svc.service.peers import (
    DEADLINE_S,
    KEYS,
    Peer,
    Reader,
    ended,
    info,
    running,
    service,
    working,
)
from tests.support.requests import submit


class CountingBus(MemoryBus):
    """Counts the turns of a scheduler."""

    num_turns = 0

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        self.num_turns += KEYS.requests in cursors
        return await super().read(cursors, block_ms, max_entries)


async def test_epochs_without_results_are_no_progress() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    peer = Peer(bus, "w1", write=lambda _: b"\xff")  # what it writes cannot be read
    await peer.announce()
    async with running(service(bus, clock_s=lambda: now_s)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9)))]))
        stalled_ms: dict[int, int] = {}  # by epoch, at its start
        while len(stalled_ms) < 4:
            if await bus.get(KEYS.info) is not None and (found := await info(bus)).epoch:
                now_s += 5 * (found.epoch not in stalled_ms)
                stalled_ms.setdefault(found.epoch, found.stalled_ms)
            await asyncio.sleep(0)
    assert [*stalled_ms.values()][1:] == [5_000, 10_000, 15_000]


async def test_an_engine_that_was_idle_has_not_stalled_when_work_comes() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    async with running(service(bus, clock_s=lambda: now_s)):
        await Peer(bus, "w1").announce()  # and does nothing
        while await bus.get(KEYS.info) is None or (await info(bus)).state != "ready":
            await asyncio.sleep(0)
        now_s += 60
        before = bus.num_turns
        while bus.num_turns < before + 2:
            await asyncio.sleep(0)

        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)
        now_s += 1
        while (await info(bus)).num_running == 0:
            await asyncio.sleep(0)
        assert (await info(bus)).stalled_ms == 1_000


async def test_a_plan_without_a_result_leads_to_a_new_epoch_later_each_time() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    reader = Reader(bus)

    def started(count: int) -> Callable[[list[Message]], bool]:
        return lambda seen: sum(isinstance(found, EpochStarted) for found in seen) >= count

    async def is_planned_anew() -> int:
        """The epoch, as soon as there is a plan in it, which no worker executes."""
        epoch = (await bus.last_id(KEYS.outputs)).epoch
        while await bus.last_id(KEYS.plans) < EntryId(epoch, 1):
            await asyncio.sleep(0)
        return epoch

    async def turns() -> None:
        before = bus.num_turns
        while bus.num_turns < before + 3:
            await asyncio.sleep(0)

    async with running(service(bus, clock_s=lambda: now_s)):
        await Peer(bus, "w1").announce()  # and does nothing
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        await reader.until(started(1))
        first = await is_planned_anew()
        now_s += 9.0
        await turns()
        assert (await bus.last_id(KEYS.outputs)).epoch == first
        now_s += 9.0
        await reader.until(started(2))
        second = await is_planned_anew()
        now_s += 18.0
        await turns()
        assert (await bus.last_id(KEYS.outputs)).epoch == second
        now_s += 18.0
        await reader.until(started(3))


async def test_a_new_worker_continues_where_the_dead_one_stopped(bus: MemoryBus) -> None:
    first, second, reader = Peer(bus, "w1"), Peer(bus, "w2"), Reader(bus)
    await first.announce()
    async with running(service(bus)):
        async with working(first):
            await bus.append(Append(KEYS.requests, [encode(submit("a", range(5), max_tokens=90))]))
            await reader.until(ended("a", 10, reader))
        await second.announce()
        async with working(second):
            await reader.until(ended("a", 90, reader))
    assert reader.tokens("a") == [position * 3 + 1 for position in range(5, 95)]
    assert sum(isinstance(message, EpochStarted) for message in reader.seen) == 2


async def test_a_new_scheduler_continues_what_the_old_one_accepted(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with working(peer):
        async with running(service(bus)):
            for name in ("a", "b"):
                asked = submit(name, range(5), max_tokens=100)
                await bus.append(Append(KEYS.requests, [encode(asked)]))
            await reader.until(ended("b", 10, reader))
        late = submit("late", range(3), max_tokens=5)
        await bus.append(Append(KEYS.requests, [encode(late)]))
        async with running(service(bus)):
            for name, count in (("a", 100), ("b", 100), ("late", 5)):
                await reader.until(ended(name, count, reader))
    for name in ("a", "b"):
        assert reader.tokens(name) == [position * 3 + 1 for position in range(5, 105)]


class RestartedBus(MemoryBus):
    """A server that can be restarted without losing anything."""

    breaks = False

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        if self.breaks and KEYS.requests in cursors:  # the scheduler's
            self.breaks = False
            raise BusUnavailable("connection closed by server")
        return await super().read(cursors, block_ms, max_entries)


async def test_a_restart_of_redis_is_not_taken_for_the_death_of_a_worker() -> None:
    bus = RestartedBus(lambda: time.time_ns() // 1_000_000)
    async with running(service(bus)):
        await Peer(bus, "w1", "life").announce()  # and does nothing: the plans are in flight
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        reader = Reader(bus)
        await reader.until(lambda seen: any(isinstance(m, RequestState) for m in seen))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)

        bus.breaks = True
        # Its lease still stands, under the name that it will give up.
        await reader.until(lambda seen: named(seen) == ["w1", "w1"])
        await Peer(bus, "w2", "life").announce()

        seen = await reader.until(lambda seen: "w2" in named(seen))
    assert named(seen) == ["w1", "w1", "w2"]
    assert [m.suspects.tolist() for m in seen if isinstance(m, EpochStarted)] == [[], [], []]


@pytest.mark.parametrize(
    ("lives", "are_suspect"), [(("one", "one"), False), (("one", "two"), True), (("", ""), True)]
)
async def test_only_a_worker_that_does_not_come_back_makes_requests_suspect(
    bus: MemoryBus, lives: tuple[str, str], are_suspect: bool
) -> None:
    async with running(service(bus)):
        await Peer(bus, "w1", lives[0]).announce()  # and does nothing: the plans are in flight
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        reader = Reader(bus)
        await reader.until(lambda seen: any(isinstance(m, RequestState) for m in seen))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)

        await Peer(bus, "w2", lives[1]).announce()
        seen = await reader.until(lambda seen: "w2" in named(seen))
    epochs = [message for message in seen if isinstance(message, EpochStarted)]
    assert [len(epoch.suspects) > 0 for epoch in epochs] == [False, are_suspect]


def named(seen: list[Message]) -> list[str]:
    """The worker of each epoch."""
    return [message.workers[0] for message in seen if isinstance(message, EpochStarted)]


async def test_a_scheduler_that_reads_anothers_epoch_exits(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    first, second = service(bus), service(bus)
    async with running(first) as old:
        await reader.until(lambda seen: len(seen) == 1)
        async with running(second):
            with pytest.raises(Superseded):
                await asyncio.wait_for(asyncio.shield(old), DEADLINE_S)
