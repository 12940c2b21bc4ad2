"""Plans that stay in the log, and snapshots between them."""

import time

import pytest

from scheduler_svc.past.plans_history import PlansHistory
from shared.bus.api import START, Append, Entry, EntryId
from shared.bus.memory import MemoryBus
from shared.codec import decode_as, encode
from shared.messages.snapshots import PoolSnapshot
from tests.scheduler_svc.service.peers import KEYS, Peer, Reader, ended, running, service, working
from tests.support.requests import submit
from tests.support.viewed_engine import ViewedEngine


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(lambda: time.time_ns() // 1_000_000)


async def entries(bus: MemoryBus, log: str) -> list[Entry]:
    return (await bus.read({log: START}, 0, 10_000)).get(log, [])


async def test_plans_stay_after_their_steps_and_snapshots_reach_back_as_far(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus, plans_retention=40)), working(peer):
        for number in range(4):
            asked = submit(f"r{number}", range(5), max_tokens=30)
            await bus.append(Append(KEYS.requests, [encode(asked)]))
            await reader.until(ended(f"r{number}", 30, reader))
        assert 40 <= await bus.length(KEYS.plans) <= 42
        deadline = time.monotonic() + 10
        while not (await last_snapshot(bus)).cached.size or (await last_snapshot(bus)).requests:
            assert time.monotonic() < deadline, "no snapshot shows the engine at rest"
            await bus.read({KEYS.snapshots: await bus.last_id(KEYS.snapshots)}, 100, 1)
    plans = await entries(bus, KEYS.plans)
    snapshots = await entries(bus, KEYS.snapshots)
    first = decode_as(PoolSnapshot, snapshots[0].messages[0])
    assert EntryId(snapshots[0].id.epoch, first.step) >= EntryId(plans[0].id.epoch, 0)


async def last_snapshot(bus: MemoryBus) -> PoolSnapshot:
    found = await entries(bus, KEYS.snapshots)
    while not found:
        found = (await bus.read({KEYS.snapshots: START}, 100, 10)).get(KEYS.snapshots, [])
    snapshot: PoolSnapshot = decode_as(PoolSnapshot, found[-1].messages[0])
    return snapshot


def history(most_plans: int, most_bytes: int = 1 << 20) -> PlansHistory:
    return PlansHistory(KEYS, most_plans, most_bytes, lambda: 0.0)


def test_without_retention_nothing_is_kept_or_written() -> None:
    found = history(0)
    found.planned(EntryId(5, 1), 100)
    assert found.plans_min_id(EntryId(5, 9)) == EntryId(5, 9)
    assert found.snapshot(ViewedEngine().core, 1_000, 1_000) is None


def test_bytes_limit_the_plans_too_and_short_memory_drops_them() -> None:
    found = history(100, most_bytes=1_000)
    for step in range(1, 21):
        found.planned(EntryId(5, step), 100)
    assert found.plans_min_id(EntryId(5, 20)) == EntryId(5, 11)
    assert found.plans_min_id(EntryId(5, 4)) == EntryId(5, 4), "its result was not read"
    found.forget_plans()
    assert found.plans_min_id(EntryId(5, 20)) == EntryId(5, 20)


def test_a_snapshot_is_written_once_for_each_state() -> None:
    engine, found = ViewedEngine(), history(100)
    first = found.snapshot(engine.core, 1_000, 1_000)
    assert first is not None
    assert found.snapshot(engine.core, 1_000, 1_500) is None
    engine.ask(submit("a", [1] * 4, max_tokens=2))
    while engine.step():
        pass
    second = found.snapshot(engine.core, 1_000, 1_000)
    assert second is not None
    assert (second.epoch, second.seq) > (first.epoch, first.seq)


async def test_a_scheduler_that_starts_keeps_what_the_one_before_has_left(bus: MemoryBus) -> None:
    engine = ViewedEngine()
    engine.ask(submit("a", [1] * 4, max_tokens=9))
    for _ in range(4):
        engine.step()
    for entry in engine.plans:
        await bus.append(Append(KEYS.plans, list(entry.messages), entry.id.epoch, entry.id.seq))
    found = history(4)
    await found.load(bus)
    assert found.plans_min_id(EntryId(2_000, 0)) == engine.plans[-4].id
