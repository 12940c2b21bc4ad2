"""Fixtures that all tests share: a real Redis of their own."""

import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from deploy.redis_server import find_redis_server, server_command
from shared.bus.redis_bus import RedisBus
from tests.support.background_walks import BackgroundWalks

_WALKS: pytest.StashKey[BackgroundWalks] = pytest.StashKey()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes longest, if it was asked for: nothing else keeps two cores busy."""
    wanted = any("background_walks" in getattr(i, "fixturenames", ()) for i in session.items)
    if wanted and not session.config.option.collectonly:
        session.config.stash[_WALKS] = BackgroundWalks(num_processes=2, steps_each=500_000)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing behind."""
    if (walks := config.stash.get(_WALKS, None)) is not None:
        walks.stop()


@pytest.fixture
def background_walks(request: pytest.FixtureRequest) -> BackgroundWalks:
    """A million random steps of the scheduler core, under way since the first test."""
    return request.config.stash[_WALKS]


@pytest.fixture
def unused_tcp_port() -> int:
    """A TCP port that nobody listens on right now."""
    return free_port()


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server that lives as long as the test session."""
    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            server_command(find_redis_server(), port, folder), stdout=log, stderr=log
        )
    client = redis.Redis(
        port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), 500)
    )
    client.ping()
    client.close()
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The session's server, empty."""
    client = redis.Redis.from_url(redis_server)
    client.flushall()
    client.close()
    return redis_server


@pytest.fixture
async def redis_bus(redis_url: str) -> AsyncIterator[RedisBus]:
    """A bus on the session's server, empty."""
    bus = RedisBus(redis_url)
    yield bus
    await bus.close()
