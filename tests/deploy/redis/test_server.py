"""The launcher's own Redis: found on any machine, reads its data, not reachable by other users."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.redis.data_folder import Version, can_read, version_of_data
from deploy.redis.server import (
    Endpoint,
    configure,
    find_redis_server,
    find_server_for,
    private_endpoint,
)
from deploy.redis.server_probe import delete_keys, redis_is_ready
from shared.bus.api import START, Append
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, PageStreamError


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is the whole of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, banner: str, name: str = "redis-server") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {banner}\n")
    path.chmod(0o755)
    return str(path)


def write_data(folder: Path, header: bytes) -> None:
    """Write the files of a server's first start."""
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.1.base.rdb").write_bytes(header)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.1.base.rdb seq 1 type b\nfile appendonly.aof.1.incr.aof seq 1 type i\n"
    )


def test_without_a_server_on_path_the_bundled_one_is_taken(on_path: Path) -> None:
    found = find_redis_server()
    printed = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert "v=9." in printed.stdout


def test_a_program_that_does_not_run_here_is_passed_over(on_path: Path) -> None:
    foreign = on_path / "redis-server"
    foreign.write_bytes(b"\x7fELF of another machine")
    foreign.chmod(0o755)
    assert find_redis_server() != str(foreign)


def test_a_server_on_path_that_is_too_old_is_passed_over(on_path: Path) -> None:
    old = install(on_path, "Redis server v=6.2.14 sha=0 malloc=libc bits=64")
    assert find_redis_server() != old


def test_a_server_on_path_that_is_new_enough_is_taken(on_path: Path) -> None:
    new = install(on_path, "Redis server v=7.0.15 sha=0 malloc=libc bits=64")
    assert find_redis_server() == new


def test_data_of_the_bundled_server_are_not_given_to_an_older_one_on_path(
    on_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    bundled = find_server_for(folder)
    with served(bundled.path, private_endpoint(folder), folder):
        pass
    assert version_of_data(folder) == bundled.version
    other = install(on_path, "Redis server v=7.0.15 sha=0 malloc=libc bits=64")
    assert find_redis_server() == other
    assert find_server_for(folder) == bundled


def test_data_that_no_server_here_can_read_are_refused_with_what_to_do(
    on_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "redis"
    write_data(folder, b"REDIS0012\xfa\x09redis-ver\x058.2.1\xfa\x0aredis-bits\xc0\x40")
    install(on_path, "Redis server v=7.0.15 sha=0 malloc=libc bits=64")
    message = r"written by Redis 8\.2.*\(Redis 7\.0\).*move .* away"
    with pytest.raises(PageStreamError, match=message):
        find_server_for(folder)


@pytest.mark.parametrize(
    ("server", "writer", "works"),
    [
        (("redis", (7, 2)), ("redis", (7, 0)), True),
        (("redis", (7, 0)), ("redis", (7, 2)), False),
        (("valkey", (9, 1)), ("redis", (7, 0)), True),
        (("valkey", (9, 1)), ("redis", (7, 4)), False),
        (("redis", (7, 0)), ("valkey", (8, 1)), False),
        (("redis", (7, 2)), ("valkey", (8, 1)), True),
        (("redis", (8, 2)), ("valkey", (9, 0)), False),
    ],
)
def test_servers_can_read_data_of_older_versions(
    server: tuple[str, tuple[int, int]], writer: tuple[str, tuple[int, int]], works: bool
) -> None:
    assert can_read(Version(*server), Version(*writer)) is works


@pytest.mark.parametrize("header", [b"", b"REDIS0010", b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n"])
def test_data_whose_writer_is_not_known_are_given_to_the_first_server(
    on_path: Path, tmp_path: Path, header: bytes
) -> None:
    write_data(tmp_path / "redis", header)
    new = install(on_path, "Redis server v=7.0.15 sha=0 malloc=libc bits=64")
    assert find_server_for(tmp_path / "redis").path == new


@contextmanager
def served(binary: str, endpoint: Endpoint, folder: Path) -> Iterator[None]:
    """Run a server of this folder inside the block."""
    command = configure(binary, endpoint, folder)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 10
            while not redis_is_ready(endpoint) and time.monotonic() < deadline:
                time.sleep(0.01)  # polling interval of the condition
            yield
        finally:
            server.terminate()


@pytest.mark.parametrize(
    ("name", "scheme"),
    [('state of 100 % "x"', "unix"), ("long" * 30, "redis")],
    ids=["short", "long"],
)
def test_only_processes_of_this_user_reach_it(tmp_path: Path, name: str, scheme: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    endpoint = private_endpoint(folder)
    assert endpoint.url.startswith(f"{scheme}://")
    with served(find_redis_server(), endpoint, folder):
        assert asyncio.run(_written_and_read(endpoint.url)) == 1
        assert delete_keys(endpoint, ["log"])
        if endpoint.path is not None:
            assert endpoint.path.stat().st_mode & 0o077 == 0
            assert endpoint.port == 0
    assert (endpoint.path is None) == (endpoint.port != 0) == (endpoint.password is not None)


def test_a_port_takes_the_password_which_is_on_no_command_line(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    endpoint = private_endpoint(tmp_path, unused_tcp_port)
    assert endpoint.password
    command = configure(find_redis_server(), endpoint, tmp_path)
    assert endpoint.password not in " ".join(command)
    assert os.stat(command[-1]).st_mode & 0o077 == 0
    assert endpoint.password not in endpoint.places
    with served(find_redis_server(), endpoint, tmp_path):
        login = f":{endpoint.password}@"
        port = f"127.0.0.1:{unused_tcp_port}/0"
        assert asyncio.run(_written_and_read(endpoint.url)) == 1
        assert asyncio.run(_written_and_read(f"redis://{login}{port}")) == 2
        with pytest.raises(BusUnavailable, match="Authentication required"):
            asyncio.run(_written_and_read(f"redis://{port}"))


async def _written_and_read(url: str) -> int:
    bus = RedisBus(url)
    try:
        await bus.append(Append("log", [b"x"]))
        return len((await bus.read({"log": START}, 0, 10))["log"])
    finally:
        await bus.close()
