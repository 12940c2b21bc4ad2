"""A Redis Cluster cannot be used: its nodes have a part of the keys each, and the error says so."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server
from shared.bus.redis_bus import RedisBus
from shared.errors import SettingsError

DEADLINE_S = 30.0
NUM_SLOTS = 16_384


def until_answers(client: redis.Redis) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            client.ping()
            return
        except redis.RedisError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)  # polling interval of the condition


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[redis.Redis]]:
    """Two servers in cluster mode, which do not know each other; the first has half of the keys."""
    with ExitStack() as stack:
        clients = []
        for name in ("a", "b"):
            folder, port = tmp_path / name, free_port()
            folder.mkdir()
            bus_port = ("--cluster-port", str(free_port()))
            place = ("--port", str(port), "--dir", str(folder), "--save", "")
            command = [find_redis_server(), *place, "--cluster-enabled", "yes", *bus_port]
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            clients.append(stack.enter_context(redis.Redis(port=port)))
            until_answers(clients[-1])
        half = NUM_SLOTS // 2
        clients[0].execute_command("CLUSTER ADDSLOTSRANGE", 0, half - 1)
        clients[1].execute_command("CLUSTER ADDSLOTSRANGE", half, NUM_SLOTS - 1)
        yield clients


def port_of(client: redis.Redis) -> int:
    found: int = client.connection_pool.connection_kwargs["port"]
    return found


async def test_a_cluster_of_several_primaries_is_refused_and_its_place_is_named(
    nodes: list[redis.Redis],
) -> None:
    first, second = nodes
    bus = RedisBus(f"redis://127.0.0.1:{port_of(first)}")
    try:
        await bus.check_server()  # alone, it has all keys that there are
        bus_port = second.config_get("cluster-port")["cluster-port"]
        first.execute_command("CLUSTER MEET", "127.0.0.1", port_of(second), bus_port)
        deadline = time.monotonic() + DEADLINE_S
        while first.execute_command("CLUSTER INFO")["cluster_size"] != "2":
            assert time.monotonic() < deadline, "the nodes do not meet"
            await asyncio.sleep(0.02)  # polling interval of the condition
        with pytest.raises(SettingsError, match=rf"127.0.0.1:{port_of(first)}.*2 primaries"):
            await bus.check_server()
    finally:
        await bus.close()


def test_a_cluster_url_is_refused_without_its_password() -> None:
    with pytest.raises(SettingsError, match=r"host:7000.*a Redis Cluster cannot be used") as found:
        RedisBus("redis+cluster://:secret@host:7000")
    assert "secret" not in str(found.value)
