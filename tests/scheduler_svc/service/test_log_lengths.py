"""The scheduler's loop keeps the logs short."""

import asyncio
import time

import msgpack
import pytest

from shared.bus.api import START, Append
from shared.bus.memory import MemoryBus
from shared.codec import Message, encode
from shared.messages.outputs import RequestEnded, RequestState
from shared.messages.requests import Attach
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


async def test_the_log_stays_short_though_no_epoch_lives_as_long_as_it_should_remember(
    bus: MemoryBus,
) -> None:
    retention, num_tokens, lengths = 100, 40, []
    for number in range(8):
        peer, reader, name = Peer(bus, f"w{number}"), Reader(bus), f"r{number}"
        await peer.announce()
        async with running(service(bus, outputs_retention=retention)), working(peer):
            request = submit(name, range(5), max_tokens=num_tokens)
            await bus.append(Append(KEYS.requests, [encode(request)]))
            await reader.until(ended(name, num_tokens, reader))
        lengths.append(await bus.length(KEYS.outputs))
    assert lengths[1] > num_tokens, "an epoch leaves what is recent"
    assert max(lengths) <= retention + 2 * num_tokens, lengths


async def test_the_log_stays_small_though_results_are_large_and_many_requests_wait(
    bus: MemoryBus,
) -> None:
    limit = 1 << 20

    def large(message: Message) -> bytes:
        packed: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), "scores": b"x" * 40_000})
        return packed

    peer, reader, sizes = Peer(bus, "w1", write=large), Reader(bus), []
    await peer.announce()
    async with (
        running(service(bus, outputs_retention_bytes=limit, max_num_sequences=1)),
        working(peer),
    ):
        long = submit("long", range(5), max_tokens=110)
        waiting = [submit(f"w{number}", range(40), max_tokens=1) for number in range(150)]
        await bus.append(Append(KEYS.requests, [encode(found) for found in (long, *waiting)]))
        for num_tokens in range(10, 101, 10):
            await reader.until(ended("long", num_tokens, reader))
            entries = (await bus.read({KEYS.outputs: START}, 0, 10_000))[KEYS.outputs]
            sizes.append(sum(entry.num_bytes for entry in entries))
        assert 40_000 * peer.num_results > 3 * limit
    assert max(sizes) < 1.3 * limit, sizes
    later = Reader(bus)
    later.cursor = await bus.last_id(KEYS.outputs)
    async with running(service(bus)):
        wanted = {found.request_id for found in (long, *waiting)}
        await later.until(lambda seen: wanted == set(map(stated, seen)) - {""})


def stated(message: Message) -> str:
    """The request that a message is the state of."""
    return message.submit.request_id if isinstance(message, RequestState) else ""


async def test_the_log_stays_short_though_nothing_is_computed(bus: MemoryBus) -> None:
    async with running(service(bus, outputs_retention=100)):
        await Peer(bus, "w1").announce()
        reader = Reader(bus)
        for number in range(300):
            unknown = Attach(f"r{number}", "gateway", "attachment", None, (), exact=False)
            await bus.append(Append(KEYS.requests, [encode(unknown)]))
            await reader.until(
                lambda seen: (
                    isinstance(seen[-1], RequestEnded) and seen[-1].request_id == f"r{number}"  # noqa: B023
                    if seen
                    else False
                )
            )
        assert await bus.length(KEYS.outputs) <= 102


class PressedBus(MemoryBus):
    """A server that has used so much of its memory."""

    share = 0.0
    num_looks = 0

    async def memory_share(self) -> float:
        self.num_looks += 1
        return self.share

    async def looked_at(self, times: int) -> None:
        """Return when the memory was looked at so often from now on."""
        until = self.num_looks + times
        deadline = time.monotonic() + DEADLINE_S
        while self.num_looks < until:
            assert time.monotonic() < deadline, "the scheduler does not look at Redis' memory"
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("share", "most"), [(0.75, 200), (0.76, 66)])
async def test_where_redis_is_short_of_memory_outputs_keep_what_recovery_needs_and_no_more(
    share: float, most: int
) -> None:
    bus = PressedBus(lambda: time.time_ns() // 1_000_000)
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus)):
        early = submit("early", range(5), max_tokens=20)
        await bus.append(Append(KEYS.requests, [encode(early)]))
        for number in range(150):
            unknown = Attach(f"r{number}", "gateway", "attachment", None, (), exact=False)
            await bus.append(Append(KEYS.requests, [encode(unknown)]))
            await reader.until(lambda seen: answers_to(f"r{number}", seen))  # noqa: B023
        bus.share = share
        await bus.looked_at(4)  # a fresh state, what is in front of it trimmed
        length = await bus.length(KEYS.outputs)
        assert most - 66 < length <= most, length
    async with running(service(bus)), working(peer):
        await reader.until(ended("early", 20, reader))
    assert reader.tokens("early") == [position * 3 + 1 for position in range(5, 25)]


def answers_to(request_id: str, seen: list[Message]) -> bool:
    """The last message is the end of this request."""
    last = seen[-1] if seen else None
    return isinstance(last, RequestEnded) and last.request_id == request_id


async def test_the_logs_stay_short_while_a_long_request_lives(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus, outputs_retention=100)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("long", [1], max_tokens=120))]))
        for number in range(30):
            asked = submit(f"r{number}", range(3), max_tokens=90)
            await bus.append(Append(KEYS.requests, [encode(asked)]))
        for number in range(30):
            await reader.until(ended(f"r{number}", 90, reader))
        assert peer.num_results > 150
        assert await bus.length(KEYS.plans) <= 4
        deadline = time.monotonic() + DEADLINE_S
        number = 30
        while await bus.length(KEYS.outputs) > 150:
            assert time.monotonic() < deadline, await bus.length(KEYS.outputs)
            asked = submit(f"r{number}", range(3), max_tokens=50)
            await bus.append(Append(KEYS.requests, [encode(asked)]))
            await reader.until(ended(f"r{number}", 50, reader))
            number += 1
    assert reader.tokens("long") == [position * 3 + 1 for position in range(1, 121)]
