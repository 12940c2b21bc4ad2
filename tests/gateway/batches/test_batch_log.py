"""The state of a batch: whoever claims it last writes it, and nothing is lost unseen."""

import time
from collections.abc import Iterator

import pytest
import redis

from gateway.batches.records import BatchState, Status
from gateway.batches.store import BatchStore
from gateway.files.store import FileStore
from shared.bus.api import START, Append, Bus
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import encode
from shared.errors import BusUnavailable, StaleWriter

STATE = BatchState(
    id="batch_" + "1" * 32,
    tenant="",
    endpoint="/v1/completions",
    input_file="file-in",
    output_file="file-out",
    error_file="file-err",
    window="24h",
    metadata="null",
    created_s=int(time.time()),
    expires_s=int(time.time()) + 86_400,
    retention_s=3_600,
)


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> BatchStore:
    bus: Bus = MemoryBus(lambda: time.time_ns() // 1_000_000)
    if request.param == "redis":
        bus = request.getfixturevalue("redis_bus")
    return BatchStore(FileStore(bus, EngineKeys("e"), 3_600, 10**9, 10**9))


async def content(store: BatchStore, file_id: str) -> bytes:
    return b"".join([data async for _, data in store.files.pieces(file_id)])


async def test_an_earlier_claim_can_write_neither_state_nor_answers(
    store: BatchStore,
) -> None:
    first = await store.begin(STATE, "one")
    await first.write(first.state, b"a\n")
    second = await store.claim(STATE.id, "two")
    assert second is not None
    assert second.state.output_bytes == 2
    with pytest.raises(StaleWriter):
        await first.write(first.state, b"b\n", b"c\n")
    await second.write(second.state, b"d\n", b"e\n")
    with pytest.raises(StaleWriter):
        await first.end(Status.COMPLETED)
    assert await content(store, STATE.output_file) == b"a\nd\n"
    assert await content(store, STATE.error_file) == b"e\n"


async def test_a_claim_at_the_same_time_is_refused(store: BatchStore) -> None:
    await store.begin(STATE, "one")
    second = await store.claim(STATE.id, "two")
    assert second is not None
    earlier = Append(store.keys.batch(STATE.id), [encode(STATE)], second.epoch, 1)
    with pytest.raises(StaleWriter):
        await store.bus.append(earlier)
    await second.write(second.state, b"a\n")
    await second.end(Status.COMPLETED)
    assert await store.claim(STATE.id, "three") is None


async def test_a_log_that_lost_its_end_is_not_written_on(store: BatchStore) -> None:
    log = await store.begin(STATE, "one")
    found = await store.bus.read({store.keys.batch(STATE.id): START}, 0, 1)
    [entry] = found[store.keys.batch(STATE.id)]
    await log.write(log.state, b"a\n")
    await store.bus.delete(store.keys.batch(STATE.id))  # a server that is back without its tail
    again = Append(store.keys.batch(STATE.id), entry.messages, entry.id.epoch, entry.id.seq)
    await store.bus.append(again)
    with pytest.raises(StaleWriter, match="lost"):
        await log.write(log.state, b"b\n")


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """May set a limit, which does not outlive the test."""
    client = redis.Redis.from_url(redis_url)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.mark.parametrize("store", ["redis"], indirect=True)
async def test_a_server_without_memory_keeps_the_state(
    store: BatchStore, admin: redis.Redis
) -> None:
    log = await store.begin(STATE, "one")
    await log.write(log.state, b"a\n")
    admin.config_set("maxmemory", 1)
    with pytest.raises(BusUnavailable):
        await log.write(log.state, b"b\n" * 10_000)
    with pytest.raises(BusUnavailable):
        await store.claim(STATE.id, "two")
    admin.config_set("maxmemory", 0)
    state, _ = await store.read(STATE.id)
    assert state is not None
    assert state.output_bytes == 2
    assert await content(store, STATE.output_file) == b"a\n"
