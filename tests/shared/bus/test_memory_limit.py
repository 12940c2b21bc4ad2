"""A Redis whose memory is used up, with ``noeviction``: what frees memory still works."""

from collections.abc import Iterator

import pytest
import redis

from shared.bus.api import START, Append, EntryId
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, StaleWriter

_ENTRY = b"x" * 10_000


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """May set a limit, which does not outlive the test."""
    client = redis.Redis.from_url(redis_url)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


def use_up(admin: redis.Redis) -> None:
    found = admin.info("memory")
    used = int(found["used_memory"]) - int(found["mem_not_counted_for_evict"])
    admin.config_set("maxmemory", used - 500_000)


async def fill(bus: RedisBus, log: str) -> None:
    for _ in range(200):
        await bus.append(Append(log, [_ENTRY], epoch=5))


async def test_an_append_that_is_refused_trims_and_is_tried_again(
    redis_bus: RedisBus, admin: redis.Redis
) -> None:
    await fill(redis_bus, "log")
    use_up(admin)
    with pytest.raises(BusUnavailable, match="maxmemory"):
        await redis_bus.append(Append("log", [_ENTRY], epoch=5))
    appended = await redis_bus.append(Append("log", [_ENTRY], epoch=5, trim_below=EntryId(5, 150)))
    assert appended == EntryId(5, 200)
    entries = (await redis_bus.read({"log": START}, 0, 1_000))["log"]
    assert [entry.id.seq for entry in entries] == [*range(150, 201)]


async def test_so_is_a_transaction_of_which_nothing_was_carried_out(
    redis_bus: RedisBus, admin: redis.Redis
) -> None:
    await fill(redis_bus, "a")
    use_up(admin)
    ids = await redis_bus.append_all(
        [Append("b", [_ENTRY], 5, 7), Append("a", [_ENTRY], 5, trim_below=EntryId(5, 100))]
    )
    assert ids == [EntryId(5, 7), EntryId(5, 200)]
    assert await redis_bus.length("b") == 1


async def test_a_writer_whose_time_is_over_trims_nothing(
    redis_bus: RedisBus, admin: redis.Redis
) -> None:
    await fill(redis_bus, "log")
    use_up(admin)
    with pytest.raises((BusUnavailable, StaleWriter)):
        await redis_bus.append(Append("log", [_ENTRY], epoch=4, trim_below=EntryId(5, 150)))
    assert await redis_bus.length("log") == 200


async def test_leases_live_on(redis_bus: RedisBus, admin: redis.Redis) -> None:
    await redis_bus.put("lease", b"value", 1_000)
    await redis_bus.add_engine("engine")
    await fill(redis_bus, "log")
    use_up(admin)
    await redis_bus.put("lease", b"another", 60_000)
    assert await redis_bus.get("lease") == b"value"
    assert admin.pttl("lease") > 30_000
    await redis_bus.add_engine("engine")
    with pytest.raises(BusUnavailable, match="maxmemory"):
        await redis_bus.put("new", b"value", 1_000)


async def test_how_much_is_used_is_seen_and_trimming_lowers_it(
    redis_bus: RedisBus, admin: redis.Redis
) -> None:
    assert await redis_bus.memory_share() == 0.0
    await fill(redis_bus, "log")
    use_up(admin)
    share = await redis_bus.memory_share()
    assert share > 1.0
    assert await redis_bus.trim("log", EntryId(5, 190)) == 190
    assert await redis_bus.memory_share() < share
