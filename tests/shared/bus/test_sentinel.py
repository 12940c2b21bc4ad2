"""A primary that fails over to its replica, as Sentinels decide, with real servers."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server
from shared.bus.api import START, Append
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, SettingsError

DEADLINE_S = 60.0
PASSWORD = "correct-horse"
LOG = "{e}:outputs"


class Servers:
    """A primary, its replica, and a Sentinel."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.primary_port, self.replica_port, self.port = (free_port() for _ in range(3))
        lines = (
            f"requirepass {PASSWORD}",
            f"masterauth {PASSWORD}",
            "save ''",
            "repl-diskless-sync-delay 0",
        )
        self.primary = self._start("primary", self.primary_port, *lines)
        replica_of = f"replicaof 127.0.0.1 {self.primary_port}"
        self._start("replica", self.replica_port, *lines, replica_of)

    def watch(self) -> None:
        """Start the Sentinel, which looks for replicas every ten seconds only."""
        self._start(
            "sentinel",
            self.port,
            f"sentinel monitor pages 127.0.0.1 {self.primary_port} 1",
            f"sentinel auth-pass pages {PASSWORD}",
            "sentinel down-after-milliseconds pages 300",
            "sentinel failover-timeout pages 2000",
        )

    def _start(self, name: str, port: int, *lines: str) -> "subprocess.Popen[bytes]":
        folder = self._folder / name
        folder.mkdir()
        file = folder / "conf"
        file.write_text("\n".join(["bind 127.0.0.1", f"port {port}", f"dir {folder}", *lines, ""]))
        command = [find_redis_server(), str(file)] + ["--sentinel"] * (name == "sentinel")
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def has_replica(self) -> bool:
        """Whether the replica has what the primary has."""
        with redis.Redis(port=self.replica_port, password=PASSWORD) as client:
            return client.info("replication")["master_link_status"] == "up"

    def sees_replica(self) -> bool:
        """Whether the Sentinel can choose the replica."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            return [one["is_slave"] for one in client.sentinel_slaves("pages")] == [True]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


@pytest.fixture
async def bus(servers: Servers) -> AsyncIterator[RedisBus]:
    gone = f"127.0.0.1:{free_port()}"  # one of the Sentinels is away
    found = RedisBus(f"redis+sentinel://:{PASSWORD}@{gone},127.0.0.1:{servers.port}/pages")
    yield found
    await found.close()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                if what():
                    return
            except redis.RedisError:
                pass
            await asyncio.sleep(0.02)  # polling interval of the condition


async def append(bus: RedisBus, data: bytes) -> None:
    """Append when the bus is there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await bus.append(Append(LOG, (data,)))
                return
            except BusUnavailable:
                await asyncio.sleep(0.02)


async def test_the_bus_goes_on_at_the_replica_when_the_primary_is_gone(
    servers: Servers, bus: RedisBus
) -> None:
    await until(servers.has_replica)
    servers.watch()
    await until(servers.sees_replica)
    await append(bus, b"before")
    with redis.Redis(port=servers.primary_port, password=PASSWORD) as client:
        assert client.wait(1, int(DEADLINE_S * 1e3)) == 1
    first = await bus.run_id()
    servers.primary.kill()
    await append(bus, b"after")
    found = await bus.read({LOG: START}, 0, 10)
    assert [entry.messages for entry in found[LOG]] == [(b"before",), (b"after",)]
    assert await bus.run_id() != first


async def test_sentinels_that_name_no_primary_are_a_bus_that_is_away() -> None:
    bus = RedisBus(f"redis+sentinel://127.0.0.1:{free_port()}/pages")
    with pytest.raises(BusUnavailable, match="pages"):
        await bus.run_id()
    await bus.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:secret@h:26379",
        "redis+sentinel://:secret@h:26379/a/b",
        "redis+sentinel://:secret@/pages",
        "redis+sentinel://:secret@h:26379,/pages",
        "redis+sentinel://:secret@h:many/pages",
        "redis+sentinel://:secret@h/pages?db=x",
        "redis+sentinel://:secret@h/pages?nonsense=1",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RedisBus(url)
    assert "redis[s]+sentinel://" in str(caught.value)
    assert "secret" not in str(caught.value)
