"""A Redis of one's own is found on any machine."""

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from deploy.ports import free_port
from deploy.probe import redis_answers
from deploy.redis_server import find_redis_server, server_command, server_url
from shared.bus.api import START, Append
from shared.bus.redis_bus import RedisBus


def test_without_a_server_on_path_the_bundled_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_server()
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    assert "v=9." in said


def test_a_server_on_path_that_is_too_old_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.2.14 sha=0 malloc=libc bits=64\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_redis_server() != str(old)


def test_a_server_on_path_that_is_new_enough_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    new = tmp_path / "redis-server"
    new.write_text("#!/bin/sh\necho Redis server v=7.0.15 sha=0 malloc=libc bits=64\n")
    new.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == str(new)


def test_it_listens_on_loopback_and_keeps_a_log(tmp_path: Path) -> None:
    command = " ".join(server_command("redis-server", 7000, tmp_path))
    assert "--bind 127.0.0.1" in command
    assert "--appendonly yes --appendfsync everysec" in command


@pytest.mark.parametrize(
    ("name", "scheme"), [("state of 100 %", "unix"), ("long" * 30, "redis")], ids=["short", "long"]
)
def test_it_is_reached_by_a_socket_in_its_folder_if_that_can_have_a_name(
    tmp_path: Path, name: str, scheme: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    port = free_port()
    url = server_url(port, folder)
    assert url.startswith(f"{scheme}://")
    command = server_command(find_redis_server(), port, folder)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 10
            while not redis_answers(port) and time.monotonic() < deadline:
                time.sleep(0.01)  # between two looks; what is waited for is the condition
            assert asyncio.run(_written_and_read(url)) == 1
        finally:
            server.terminate()


async def _written_and_read(url: str) -> int:
    bus = RedisBus(url)
    await bus.append(Append("log", [b"x"]))
    entries = await bus.read({"log": START}, 0, 10)
    await bus.close()
    return len(entries["log"])
