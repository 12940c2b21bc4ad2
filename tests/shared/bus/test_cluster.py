"""A real Redis Cluster whose slots move and whose primaries die: nothing is lost or doubled."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import hiredis
import pytest
from redis.crc import key_slot

from shared.bus.api import START, Append
from shared.bus.pools import ClusterUrl
from shared.bus.redis_bus import RedisBus
from shared.bus.slot_map import Address, SlotMap
from shared.errors import BusUnavailable, LoginRefused, SettingsError
from tests.support.processes.redis_cluster import Node, RedisCluster

DEADLINE_S = 60.0
ENGINE = "engine-0"
A, B = "{engine-0}:plans", "{engine-0}:outputs"


@pytest.fixture
async def bus(redis_cluster: RedisCluster) -> AsyncIterator[RedisBus]:
    found = RedisBus.of_engine(redis_cluster.url, ENGINE)
    yield found
    await found.close()


@pytest.fixture
async def reader(redis_cluster: RedisCluster) -> AsyncIterator[RedisBus]:
    found = RedisBus.of_engine(redis_cluster.url, ENGINE)
    yield found
    await found.close()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.005)  # polling interval of the condition


def num_errors(nodes: list[Node], kind: str) -> int:
    """Replies of nodes with one kind of error."""
    found: list[dict[str, Any]] = [node.client.info("errorstats") for node in nodes]
    return sum(one.get(f"errorstat_{kind}", {"count": 0})["count"] for one in found)


def num_blocked(node: Node) -> int:
    found: int = node.client.info("clients")["blocked_clients"]
    return found


class Writer:
    """Appends numbered entries to two logs at once, one transaction after the other."""

    def __init__(self, bus: RedisBus) -> None:
        self.count = 0
        self._bus = bus
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Return when the last append has its reply; raises what an append raised."""
        task, self._task = self._task, asyncio.current_task()  # type: ignore[assignment]
        await task

    async def _run(self) -> None:
        own = self._task
        while self._task is own:
            data = b"%d" % self.count
            await self._bus.append_all([Append(log, (data,), 1, self.count + 1) for log in (A, B)])
            self.count += 1


class Reader:
    """Reads both logs with blocking reads."""

    def __init__(self, bus: RedisBus) -> None:
        self.entries: dict[str, list[bytes]] = {A: [], B: []}
        self._bus = bus

    async def follow(self, count: Callable[[], int | None]) -> None:
        """Read until both logs had so many entries; None: there will be more."""
        cursors = {A: START, B: START}
        while any(len(entries) != count() for entries in self.entries.values()):
            for log, entries in (await self._bus.read(cursors, 50, 100)).items():
                cursors[log] = entries[-1].id
                self.entries[log] += [data for entry in entries for data in entry.messages]


async def test_a_slot_moves_under_transactions_and_blocking_reads_and_nothing_is_lost_or_doubled(
    bus: RedisBus, reader: RedisBus, redis_cluster: RedisCluster
) -> None:
    source = redis_cluster.owner(A)
    target, nodes = redis_cluster.other_than(source), redis_cluster.primaries
    counts = {kind: num_errors(nodes, kind) for kind in ("TRYAGAIN", "ASK", "MOVED")}
    writer, final = Writer(bus), list[int]()
    reading = Reader(reader)
    follow = asyncio.create_task(reading.follow(lambda: final[0] if final else None))
    await until(lambda: writer.count > 20)
    with redis_cluster.moving(A, target) as migrate:
        migrate(A)  # the logs are on two nodes now
        await until(lambda: num_errors([source, target], "TRYAGAIN") > counts["TRYAGAIN"] + 1)
        migrate(B)
        before = writer.count
        await until(lambda: writer.count > before + 20)
        assert num_errors([source], "ASK") > counts["ASK"]
    before = writer.count
    await until(lambda: writer.count > before + 20)
    # Transactions and reads were redirected once or twice each: the new owner is remembered.
    assert 1 <= num_errors([source], "MOVED") - counts["MOVED"] <= 10
    await writer.end()
    final.append(writer.count)
    async with asyncio.timeout(DEADLINE_S):
        await follow
    expected = [b"%d" % number for number in range(writer.count)]
    assert reading.entries == {A: expected, B: expected}
    assert redis_cluster.owner(A) is target


async def test_a_read_that_waits_at_the_old_node_goes_on_at_the_new_one(
    bus: RedisBus, reader: RedisBus, redis_cluster: RedisCluster
) -> None:
    first = await bus.append(Append(A, (b"1",)))
    source = redis_cluster.owner(A)
    reading = asyncio.create_task(reader.read({A: first}, 5_000, 10))
    await until(lambda: num_blocked(source) == 1)
    redis_cluster.move(A, redis_cluster.other_than(source))
    second = await bus.append(Append(A, (b"2",)))
    assert second > first
    [entry] = (await reading)[A]
    assert entry == (second, (b"2",))


async def test_values_whose_slots_have_moved_are_found(
    bus: RedisBus, redis_cluster: RedisCluster
) -> None:
    keys = [f"engine:{number}" for number in range(20)]
    for key in keys:
        await bus.put(key, key.encode(), 60_000)
    for key in keys[:5]:
        redis_cluster.move(key, redis_cluster.other_than(redis_cluster.owner(key)))
    assert await bus.get_all(keys) == [key.encode() for key in keys]


async def test_clock_run_id_and_memory_are_those_of_the_node_with_the_engines_logs(
    bus: RedisBus, redis_cluster: RedisCluster
) -> None:
    source = redis_cluster.owner(A)
    target = redis_cluster.other_than(source)
    source.client.config_set("maxmemory", "1gb")
    try:
        assert await bus.run_id() == source.client.info("server")["run_id"]
        assert await bus.memory_share() > 0
        with redis_cluster.moving(A, target):  # the next node is not the owner yet
            assert await bus.run_id() == source.client.info("server")["run_id"]
            assert await bus.memory_share() > 0
        assert await bus.run_id() == target.client.info("server")["run_id"]
        assert await bus.memory_share() == 0
    finally:
        source.client.config_set("maxmemory", "0")
    at_s = target.client.time()[0]
    assert at_s <= await bus.now_ms() // 1_000 <= target.client.time()[0]


async def test_an_append_without_a_reply_is_not_repeated(
    bus: RedisBus, redis_cluster: RedisCluster
) -> None:
    await bus.append(Append(A, (b"1",), 1, 1))
    owner = redis_cluster.owner(A).client
    owner.execute_command("CLIENT PAUSE", 60_000, "WRITE")
    appending = asyncio.create_task(bus.append(Append(A, (b"2",), 1, 2)))
    await until(lambda: owner.info("clients")["blocked_clients"] == 1)
    owner.client_kill_filter(_type="normal", skipme=True)
    owner.execute_command("CLIENT UNPAUSE")  # another attempt would succeed
    with pytest.raises(BusUnavailable):
        await appending
    await bus.append(Append(A, (b"3",), 1, 3))
    assert [entry.id.seq for entry in (await bus.read({A: START}, 0, 10))[A]] == [1, 3]


async def test_a_slot_that_no_node_serves_is_a_bus_that_is_away_until_one_does(
    bus: RedisBus, redis_cluster: RedisCluster
) -> None:
    await bus.put(A, b"1", 60_000)
    owner, slot = redis_cluster.owner(A), key_slot(A.encode())
    owner.client.execute_command("CLUSTER DELSLOTS", slot)
    with pytest.raises(BusUnavailable):
        await bus.get(A)
    owner.client.execute_command("CLUSTER ADDSLOTS", slot)
    assert await until_there(lambda: bus.get(A)) == b"1"


async def test_the_slots_are_read_again_after_a_node_has_called_the_cluster_down() -> None:
    down, ports, has_moved = b"-CLUSTERDOWN The cluster is down\r\n", list[int](), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port, parser = writer.get_extra_info("sockname")[1], hiredis.Reader()
        while data := await reader.read(4_096):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                reply = b"+OK\r\n"
                if command[0] == b"CLUSTER":
                    node = f"*2\r\n$9\r\n127.0.0.1\r\n:{ports[has_moved.is_set()]}\r\n"
                    reply = f"*1\r\n*3\r\n:0\r\n:16383\r\n{node}".encode()
                elif command[0] == b"GET":
                    reply = down if port == ports[0] else b"$5\r\nvalue\r\n"
                writer.write(reply)
        writer.close()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    ports += [server.sockets[0].getsockname()[1] for server in servers]
    bus = RedisBus(f"redis+cluster://127.0.0.1:{ports[0]}")
    try:
        with pytest.raises(BusUnavailable, match="The cluster is down"):
            await bus.get(A)
        has_moved.set()
        assert await bus.get(A) == b"value"
    finally:
        await bus.close()
        for server in servers:
            server.close()


async def until_there(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a call returns when the bus is there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await call()
            except BusUnavailable:
                await asyncio.sleep(0.02)


async def test_user_and_password_are_sent_to_every_node(redis_cluster: RedisCluster) -> None:
    keys = [f"engine:{number}" for number in range(20)]
    with_password = RedisBus(redis_cluster.url.replace("://", "://:correct-horse@"))
    without = RedisBus(redis_cluster.url)
    clients = [node.client for node in redis_cluster.primaries]
    for client in clients:
        client.config_set("requirepass", "correct-horse")
    try:
        assert await with_password.get_all(keys) == [None] * 20
        with pytest.raises(LoginRefused):
            await without.get_all(keys)
    finally:
        for client in clients:
            client.config_set("requirepass", "")
        await with_password.close()
        await without.close()


async def test_a_replica_takes_over_from_a_primary_that_is_killed(
    bus: RedisBus, redis_cluster: RedisCluster
) -> None:
    primary = redis_cluster.owner(A)
    replica = redis_cluster.add_replica(primary)
    await bus.append(Append(A, (b"before",)))
    assert primary.client.wait(1, int(DEADLINE_S * 1e3)) == 1
    first = await bus.run_id()
    with redis_cluster.killed(primary, replica):
        await until_there(lambda: bus.append(Append(A, (b"after",))))
    entries = (await bus.read({A: START}, 0, 10))[A]
    assert [entry.messages for entry in entries] == [(b"before",), (b"after",)]
    assert await bus.run_id() != first


async def test_the_url_of_one_node_is_refused_with_that_of_the_cluster(
    redis_cluster: RedisCluster,
) -> None:
    node = redis_cluster.primaries[0]
    bus = RedisBus.of_directory(f"redis://:secret@{node.place}/0")
    node.client.config_set("requirepass", "secret")
    try:
        with pytest.raises(SettingsError) as caught:
            await bus.check_server()
        with pytest.raises(BusUnavailable, match=r"redis\+cluster://"):
            await asyncio.gather(*map(bus.get, ("a", "b", "c", "d")))
    finally:
        node.client.config_set("requirepass", "")
        await bus.close()
    message = str(caught.value)
    assert "PAGESTREAM_DIRECTORY_URL" in message
    assert f"redis+cluster://{node.place}" in message
    assert "3 primaries" in message
    assert "secret" not in message


async def test_a_cluster_is_checked_and_a_single_server_is_refused_as_one(
    bus: RedisBus, redis_url: str, redis_cluster: RedisCluster
) -> None:
    assert int((await bus.check_server()).split(".")[0]) >= 7
    warnings = await bus.settings_warnings()
    for node in redis_cluster.primaries:  # they keep nothing on the disk
        assert any(
            found.startswith(f"{node.place}: ") and "appendonly" in found for found in warnings
        )
    single = RedisBus(redis_url.replace("redis://", "redis+cluster://"))
    with pytest.raises(SettingsError, match="no node of a Redis Cluster"):
        await single.check_server()
    await single.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://:secret@/",
        "redis+cluster://:secret@h:7000,",
        "redis+cluster://:secret@h:many",
        "redis+cluster://:secret@h:7000/1",
        "redis+cluster://:secret@h:7000?nonsense=1",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RedisBus(url)
    assert "redis[s]+cluster://" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_node_has_the_login_and_the_options_of_its_cluster() -> None:
    url = ClusterUrl.parse("rediss+cluster://u:p%40@h:7000,[::1]/0?ssl_ca_certs=/ca.pem")
    assert url is not None
    assert url.places == (("h", 7000), ("::1", 6379))
    assert url.at("10.0.0.1", 7) == "rediss://u:p%40@10.0.0.1:7/0?ssl_ca_certs=/ca.pem"
    assert url.at("::2", 7) == "rediss://u:p%40@[::2]:7/0?ssl_ca_certs=/ca.pem"
    assert ClusterUrl.parse("redis://h:7000/0") is None


def test_the_map_of_slots_has_hosts_that_are_not_announced_and_slots_that_no_node_has() -> None:
    asked = Address("h", 7000)
    reply = [
        [100, 200, [b"10.0.0.2", 7001, b"id"], [b"10.0.0.3", 7002, b"id"]],
        [0, 49, [None, 7000, b"id"]],
        [300, 300, [b"10.0.0.2", 7001, b"id"]],
    ]
    slots = SlotMap.parse(reply, asked)
    other = Address("10.0.0.2", 7001)
    found = [slots.owner(slot) for slot in (0, 49, 50, 99, 100, 200, 201, 300, 301)]
    assert found == [asked, asked, None, None, other, other, None, other, None]
    assert slots.primaries == [asked, other]
    assert slots.nodes == [asked, other, Address("10.0.0.3", 7002)]
    slots.move(100, asked)
    assert slots.owner(100) == asked
