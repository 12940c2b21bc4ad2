"""The scheduler's loop serves requests, and answers those that it cannot."""

import asyncio
import time

import pytest

from shared.bus.api import Append
from shared.bus.memory import MemoryBus
from shared.codec import decode_as, encode
from shared.errors import BusUnavailable
from shared.messages.leases import EngineInfo
from shared.messages.outputs import RequestEnded, StepResult
from shared.messages.requests import Abort
from tests.scheduler_svc.service.peers import (
    DEADLINE_S,
    KEYS,
    Peer,
    Reader,
    ended,
    running,
    service,
    working,
)
from tests.support.requests import submit


async def test_a_request_is_accepted_planned_and_finished(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9), max_tokens=20))]))
        await reader.until(ended("a", 20, reader))
    assert reader.tokens("a") == [position * 3 + 1 for position in range(9, 29)]
    info = decode_as(EngineInfo, await bus.get(KEYS.info) or b"")
    assert info.detail == "the scheduler was stopped"


@pytest.mark.parametrize(("pause_s", "largest"), [(0.0, 100), (0.002, 20), (0.0001, 16)])
async def test_prompts_lengthen_the_steps_of_others_by_no_more_than_a_pause(
    bus: MemoryBus, pause_s: float, largest: int
) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)  # which computes 10,000 tokens of prompts a second
    await peer.announce()
    async with running(service(bus, prefill_pause=pause_s)), working(peer):
        first = submit("first", range(5), max_tokens=120)
        await bus.append(Append(KEYS.requests, [encode(first)]))
        await reader.until(ended("first", 3, reader))
        late = submit("late", range(100, 200), max_tokens=2)
        await bus.append(Append(KEYS.requests, [encode(late)]))
        await reader.until(ended("late", 2, reader))
        await reader.until(ended("first", 120, reader))
    results = [message for message in reader.seen if isinstance(message, StepResult)]
    # One more row is the first request's.
    assert max(result.num_batched_tokens for result in results) in (largest, largest + 1)


class AbsentBus(MemoryBus):
    """A server that does not answer."""

    num_asked = 0

    async def add_engine(self, engine_id: str) -> None:
        self.num_asked += 1
        raise BusUnavailable("connection refused")


async def test_a_scheduler_that_waits_for_redis_ends_when_asked() -> None:
    bus = AbsentBus(lambda: time.time_ns() // 1_000_000)
    found = service(bus, drain_timeout=30.0)
    task = asyncio.create_task(found.run())
    while bus.num_asked == 0:
        await asyncio.sleep(0)
    found.stop()
    await asyncio.wait_for(task, DEADLINE_S)


async def test_an_abort_ends_the_request_unless_it_is_stale(bus: MemoryBus) -> None:
    await Peer(bus, "w1").announce()
    reader = Reader(bus)
    async with running(service(bus)):
        await bus.append(Append(KEYS.requests, [encode(submit("a"))]))
        await bus.append(Append(KEYS.requests, [encode(Abort("a", "an older one", "gone"))]))
        await bus.append(Append(KEYS.requests, [encode(submit("b"))]))
        await bus.append(Append(KEYS.requests, [encode(Abort("b", "attachment", "gone"))]))
        seen = await reader.until(lambda seen: any(isinstance(m, RequestEnded) for m in seen))
    endings = [message for message in seen if isinstance(message, RequestEnded)]
    assert [(ending.request_id, ending.reason) for ending in endings] == [("b", "abort")]


async def test_a_request_that_cannot_be_read_is_answered(bus: MemoryBus) -> None:
    await Peer(bus, "w1").announce()
    reader = Reader(bus)
    broken = encode(submit("broken")).replace(b"prompt", b"tpmorp")
    async with running(service(bus)):
        await bus.append(Append(KEYS.requests, [b"\xff\xffnot msgpack"]))
        await bus.append(Append(KEYS.requests, [broken]))
        seen = await reader.until(lambda seen: any(isinstance(m, RequestEnded) for m in seen))
    [ending] = [message for message in seen if isinstance(message, RequestEnded)]
    assert (ending.request_id, ending.reason) == ("broken", "error")
    assert "prompt" in ending.error
