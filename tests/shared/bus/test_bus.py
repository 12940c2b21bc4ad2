"""One contract, two implementations: memory, and Redis as one server or as a cluster."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.memory import MemoryBus
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, StaleWriter


@pytest.fixture(params=["memory", "redis", "cluster"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield MemoryBus(lambda: time.time_ns() // 1_000_000)
    else:
        of_cluster = request.param == "cluster"
        name = "redis_cluster" if of_cluster else "redis_url"
        server = request.getfixturevalue(name)
        found = RedisBus(server.url if of_cluster else server)
        yield found
        await found.close()


async def until_blocked(bus: Bus) -> None:
    """Return when the one reader waits for an entry."""
    await asyncio.sleep(0)  # in memory nothing else is needed
    async with asyncio.timeout(5):
        while isinstance(bus, RedisBus) and not await num_blocked(bus):
            await asyncio.sleep(0.001)


async def num_blocked(bus: RedisBus) -> int:
    text: bytes = await bus._execute("log", "INFO", "clients")
    return int(text.partition(b"blocked_clients:")[2].split()[0])


async def test_an_entry_keeps_its_messages_together_and_byte_exact(bus: Bus) -> None:
    blob = bytes(range(256))
    entry_id = await bus.append(Append("log", [blob, b""]))
    [entry] = (await bus.read({"log": START}, 0, 10))["log"]
    assert entry == (entry_id, (blob, b""))


async def test_sequence_numbers_of_an_epoch_are_drawn_by_the_log(bus: Bus) -> None:
    ids = [await bus.append(Append("log", [b"x"], epoch=7)) for _ in range(3)]
    assert ids == [EntryId(7, 0), EntryId(7, 1), EntryId(7, 2)]
    assert await bus.last_id("log") == EntryId(7, 2)


@pytest.mark.parametrize("epoch", [6, 7])
async def test_a_writer_of_an_older_epoch_is_refused_and_trims_nothing(
    bus: Bus, epoch: int
) -> None:
    first = await bus.append(Append("log", [b"x"], epoch=7, seq=1))
    await bus.append(Append("log", [b"x"], epoch=7, seq=5))
    with pytest.raises(StaleWriter):
        await bus.append(Append("log", [b"y"], epoch=epoch, seq=5, trim_below=EntryId(7, 5)))
    entries = (await bus.read({"log": START}, 0, 10))["log"]
    assert [entry.id for entry in entries] == [first, EntryId(7, 5)]


async def test_trimming_drops_what_is_below_and_is_not_forgotten_by_the_id_counter(
    bus: Bus,
) -> None:
    for seq in range(5):
        await bus.append(Append("log", [b"x"], epoch=1, seq=seq))
    await bus.append(Append("log", [b"x"], epoch=1, trim_below=EntryId(1, 4)))
    entries = (await bus.read({"log": START}, 0, 10))["log"]
    assert [entry.id.seq for entry in entries] == [4, 5]
    assert await bus.length("log") == 2
    await bus.append(Append("log", [b"x"], epoch=1, trim_below=EntryId(2, 0)))
    assert await bus.length("log") == 0
    assert await bus.last_id("log") == EntryId(1, 6)


async def test_one_read_returns_what_is_new_in_several_logs(bus: Bus) -> None:
    a = await bus.append(Append("{e}:a", [b"1"], epoch=1))
    b = await bus.append(Append("{e}:b", [b"2"], epoch=1))
    await bus.append(Append("{e}:b", [b"3"], epoch=1))
    found = await bus.read({"{e}:a": a, "{e}:b": b}, 0, 10)
    assert list(found) == ["{e}:b"]
    assert [entry.messages for entry in found["{e}:b"]] == [(b"3",)]
    assert len((await bus.read({"{e}:b": START}, 0, 1))["{e}:b"]) == 1


async def test_a_blocked_reader_wakes_on_the_first_entry(bus: Bus) -> None:
    reading = asyncio.create_task(bus.read({"log": START}, 5_000, 10))
    await until_blocked(bus)
    await bus.append(Append("log", [b"x"]))
    assert "log" in await asyncio.wait_for(reading, 4)


async def test_an_idle_read_returns_nothing_when_its_time_is_up(bus: Bus) -> None:
    assert await bus.read({"log": START}, 20, 10) == {}


async def test_a_transaction_appends_to_both_logs(bus: Bus) -> None:
    ids = await bus.append_all(
        [Append("{e}:a", [b"1"], epoch=9, seq=0), Append("{e}:b", [b"2"], epoch=9, seq=0)]
    )
    assert ids == [EntryId(9, 0), EntryId(9, 0)]
    with pytest.raises(StaleWriter):
        await bus.append_all(
            [Append("{e}:a", [b"1"], epoch=9, seq=0), Append("{e}:b", [b"2"], epoch=9, seq=1)]
        )


async def test_many_may_append_at_once(bus: Bus) -> None:
    ids = await asyncio.gather(*(bus.append(Append("log", [b"x"])) for _ in range(500)))
    assert len(set(ids)) == 500
    assert await bus.length("log") == 500


async def test_keys_expire(bus: Bus) -> None:
    await bus.put("lease", b"mine", 60_000)
    assert await bus.get("lease") == b"mine"
    await bus.put("lease", b"mine", 1)
    deadline = asyncio.get_running_loop().time() + 5
    while await bus.get("lease") is not None:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


async def test_logs_and_values_expire_after_their_time_to_live(bus: Bus) -> None:
    await bus.append(Append("log", [b"x"]))
    await bus.put("value", b"x", 60_000)
    assert not await bus.expire("neither", 1)
    for name in ("log", "value"):
        assert await bus.expire(name, 60_000)
        assert await bus.expire(name, 1)
    deadline = asyncio.get_running_loop().time() + 5
    while await bus.get("value") is not None or await bus.last_id("log") != START:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)
    assert await bus.read({"log": START}, 0, 10) == {}


async def test_what_is_deleted_is_gone(bus: Bus) -> None:
    await bus.append(Append("log", [b"x"]))
    await bus.put("value", b"x", 60_000)
    await bus.delete("log", "value", "neither")
    assert await bus.last_id("log") == START
    assert await bus.get("value") is None


async def test_a_tally_adds_up_without_its_oldest_buckets(bus: Bus) -> None:
    assert await bus.tally("tally", 7, 0, 0, 60_000) == 0
    assert await bus.tally("tally", 7, 5, 0, 60_000) == 5
    assert await bus.tally("tally", 8, 3, 7, 60_000) == 8
    assert await bus.tally("tally", 8, -1, 7, 60_000) == 7
    assert await bus.tally("tally", 9, 1, 8, 60_000) == 3
    assert await bus.tally("tally", 9, 0, 0, 60_000) == 3, "old buckets are dropped"


async def test_values_are_found_in_the_order_of_their_keys(bus: Bus) -> None:
    keys = [f"engine:{number}" for number in range(20)]  # of a cluster, all nodes have some
    for key in keys[::2]:
        await bus.put(key, key.encode(), 60_000)
    expected = [None if number % 2 else key.encode() for number, key in enumerate(keys)]
    assert await bus.get_all(keys) == expected
    assert await bus.delete(*keys) == 10


async def test_a_value_is_swapped_for_the_one_that_is_known_alone(bus: Bus) -> None:
    assert await bus.swap("placement", None, b"1", 60_000)
    assert not await bus.swap("placement", None, b"2", 60_000)
    assert not await bus.swap("placement", b"2", b"3", 60_000)
    assert await bus.swap("placement", b"1", b"2", 60_000)
    assert await bus.get("placement") == b"2"


async def test_engines_are_listed_once(bus: Bus) -> None:
    for engine in ("b", "a", "b"):
        await bus.add_engine(engine)
    assert await bus.engines() == ["a", "b"]


async def test_a_redis_that_never_replies_fails_all_appends_in_the_time_of_two_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.redis_bus._REPLY_TIMEOUT_S", 0.3)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bus = RedisBus(f"redis://127.0.0.1:{port}/0", max_block_ms=0)
    async with asyncio.timeout(3):
        appending = [bus.append(Append("log", [b"x"])) for _ in range(640)]
        found = await asyncio.gather(*appending, return_exceptions=True)
    assert {type(error) for error in found} == {BusUnavailable}
    await bus.close()
    server.close()


async def test_redis_that_is_not_there_is_reported_as_unavailable(unused_tcp_port: int) -> None:
    bus = RedisBus(f"redis://127.0.0.1:{unused_tcp_port}/0")
    with pytest.raises(BusUnavailable):
        await bus.append(Append("log", [b"x"]))
    with pytest.raises(BusUnavailable):
        await bus.read({"log": START}, 10, 10)
    await bus.close()
