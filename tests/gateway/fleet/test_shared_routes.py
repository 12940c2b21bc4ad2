"""Choices of one gateway, as others read them from the directory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet import shared_routes
from gateway.fleet.prefix_index import PrefixIndex, prefixes_of
from gateway.fleet.shared_routes import SharedRoutes
from shared.bus.api import Append, EntryId
from shared.bus.keys import routes
from shared.bus.memory import MemoryBus
from shared.codec import IntArray
from shared.errors import BusUnavailable
from shared.messages.routes import Routed, unpack_hashes

DEADLINE_S = 20
PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # where the prompt leaves the common beginning
        st.integers(1, 40),
        st.sampled_from(["alice", "bob"]),
        st.sampled_from(["", "salt"]),
        st.sampled_from(["a", "b", "c"]),
    ),
    max_size=12,
)


class Reader:
    """A gateway's index, filled from the log alone."""

    def __init__(self, bus: MemoryBus) -> None:
        self.shared = SharedRoutes(bus, "demo")
        self.index = PrefixIndex()
        self.routed: list[Routed] = []

    def take(self, routed: Routed) -> None:
        self.routed.append(routed)
        self.index.sent(unpack_hashes(routed.prefixes), routed.engine)


class FailingBus(MemoryBus):
    """A directory that can be away."""

    is_away = False
    num_refused = 0

    async def append(self, append: Append) -> EntryId:
        if self.is_away:
            self.num_refused += 1
            raise BusUnavailable("away")
        return await super().append(append)


@asynccontextmanager
async def sharing(bus: MemoryBus, count: int) -> AsyncIterator[list[Reader]]:
    readers = [Reader(bus) for _ in range(count)]
    for reader in readers:
        reader.shared.start(reader.take)
    try:
        yield readers
    finally:
        for reader in readers:
            await reader.shared.end()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.001)


async def until_read(reader: Reader, count: int) -> None:
    await until(lambda: len(reader.routed) == count)


def tokens(count: int, first: int = 0) -> IntArray:
    return np.arange(first, first + count, dtype=np.int32)


def memory_bus() -> MemoryBus:
    return MemoryBus(lambda: 1)


@given(sent=PROMPTS)
@settings(max_examples=25, deadline=None)
def test_another_gateway_expects_of_every_prompt_what_the_one_that_sent_it_does(
    sent: list[tuple[int, int, str, str, str]],
) -> None:
    async def run() -> None:
        own = PrefixIndex()
        prompts = []
        async with sharing(memory_bus(), 2) as [sender, other]:
            for branch, length, tenant, salt, engine in sent:
                text = np.concatenate([tokens(64), tokens(16 * length, 1_000 * branch)])
                prompt = prefixes_of(text, tenant, salt)
                own.sent(prompt.hashes, engine)
                sender.shared.send(engine, prompt.hashes, len(text))
                prompts.append(prompt)
            await until_read(other, len(sent))
            assert sender.routed == [], "a gateway does not take its own choices twice"
        for prompt in prompts:
            assert other.index.expected(prompt) == own.expected(prompt)
        stranger = prefixes_of(tokens(64), "carol", "")
        assert other.index.expected(stranger) == {}

    asyncio.run(run())


async def test_a_gateway_that_starts_later_reads_what_was_sent_before() -> None:
    bus = memory_bus()
    prompt = prefixes_of(tokens(200), "", "")
    async with sharing(bus, 1) as [first]:
        first.shared.send("a", prompt.hashes, 200)
        await until(lambda: first.shared._kept)
    async with sharing(bus, 1) as [later]:
        await until(lambda: later.routed)
        assert later.index.expected(prompt)["a"] == 192
        assert later.routed[0].num_new_tokens == 200


async def test_the_log_and_what_is_kept_of_it_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_routes, "MAX_LOG_BYTES", 4_000)
    bus = memory_bus()
    async with sharing(bus, 2) as [first, second]:
        for number in range(100):
            first.shared.send("a", prefixes_of(tokens(64, 100 * number), "", "").hashes, 64)
            await until_read(second, number + 1)
            await until(lambda: not first.shared._waiting)
        entries = await bus.read({routes("demo"): EntryId(0, 0)}, 0, 1_000)
        assert 10 < len(entries[routes("demo")]) < 60
        assert second.shared._kept_bytes <= 4_000


async def test_a_directory_that_is_away_stops_nothing_and_what_waits_is_bounded() -> None:
    bus = FailingBus(lambda: 1)
    bus.is_away = True
    async with sharing(bus, 2) as [first, second]:
        for number in range(3_000):
            first.shared.send("a", [number], 1)
        assert len(first.shared._waiting) <= 1_024
        await until(lambda: bus.num_refused)
        bus.is_away = False
        last = (2_999).to_bytes(8, "little")
        await until(lambda: second.routed and second.routed[-1].prefixes == last)


async def test_a_log_that_was_deleted_is_read_from_its_new_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_routes, "_BLOCK_MS", 5)
    clock = [1_000]
    bus = MemoryBus(lambda: clock[0])
    async with sharing(bus, 2) as [first, second]:
        first.shared.send("a", [1], 1)
        await until(lambda: second.routed)
        await bus.delete(routes("demo"))
        clock[0] = 1  # another server, whose clock is behind

        def is_shared() -> bool:
            first.shared.send("b", [2], 1)
            return second.routed[-1].engine == "b"

        await until(is_shared)


async def test_an_entry_that_is_no_route_is_passed_over() -> None:
    bus = memory_bus()
    async with sharing(bus, 2) as [first, second]:
        await bus.append(Append(routes("demo"), [b"nonsense", b"\x80"]))
        first.shared.send("a", [7], 1)
        await until(lambda: second.routed)
