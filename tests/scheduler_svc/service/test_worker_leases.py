"""The scheduler's loop and workers that fail, or are of another version."""

import asyncio
import time

import msgpack
import pytest

from shared.bus.api import Append
from shared.bus.memory import MemoryBus
from shared.codec import Message, decode_as, encode
from shared.messages.leases import PROTOCOL, EngineInfo
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


async def state_of_engine(bus: MemoryBus, patience_s: float, *states: str) -> EngineInfo:
    """What the scheduler publishes while the worker's lease goes through these states."""
    now_s = 0.0
    found = service(bus, lambda: now_s, worker_patience=patience_s)
    worker = Peer(bus, "w1")
    await worker.announce(states[0], "no such folder")
    async with running(found):
        for state in states:
            await worker.announce(state, "no such folder" if state == "failed" else "")
            await bus.put(KEYS.info, b"", 1)
            deadline = time.monotonic() + DEADLINE_S
            while not (value := await bus.get(KEYS.info)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0)
            now_s += 10.0
        return decode_as(EngineInfo, value)


@pytest.mark.parametrize(
    ("patience_s", "states", "state", "detail"),
    [
        (0, ["failed"], "failed", "no such folder"),
        (5, ["failed"], "starting", "the worker cannot start: no such folder"),
        (15, ["failed", "loading"], "starting", "the worker cannot start: no such folder"),
        (15, ["failed", "loading", "failed"], "failed", "no such folder"),
        (15, ["failed", "ready", "loading"], "starting", "no worker is ready"),
        (15, ["failed", "ready", "loading", "failed"], "starting", "cannot start: no such folder"),
    ],
)
async def test_an_engine_has_failed_when_its_workers_could_not_start_for_a_while(
    bus: MemoryBus, patience_s: float, states: list[str], state: str, detail: str
) -> None:
    info = await state_of_engine(bus, patience_s, *states)
    assert info.state == state
    assert info.detail.endswith(detail)


async def test_a_worker_whose_results_have_a_field_more_is_worked_with(bus: MemoryBus) -> None:
    def newer(message: Message) -> bytes:
        packed: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), "newer": [1]})
        return packed

    peer, reader = Peer(bus, "w1", write=newer), Reader(bus)
    await peer.announce()
    async with running(service(bus)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9), max_tokens=20))]))
        await reader.until(ended("a", 20, reader))
    assert sum(isinstance(message, EpochStarted) for message in reader.seen) == 1


async def test_a_worker_of_another_protocol_is_refused_until_one_of_this_comes(
    bus: MemoryBus,
) -> None:
    await Peer(bus, "w1", protocol=PROTOCOL + 1).announce()
    peer, reader = Peer(bus, "w2"), Reader(bus)
    async with running(service(bus, worker_patience=0)):
        while await bus.get(KEYS.info) is None:
            await asyncio.sleep(0)
        found = await info(bus)
        assert (found.state, found.epoch) == ("failed", 0)
        assert f"the worker speaks protocol {PROTOCOL + 1}" in found.detail
        await peer.announce()
        async with working(peer):
            await bus.append(Append(KEYS.requests, [encode(submit("a", range(9)))]))
            await reader.until(ended("a", 16, reader))
