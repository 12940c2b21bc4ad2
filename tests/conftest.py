"""Fixtures that all tests share: a real Redis of their own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_redis_server
from deploy.settings import REPOSITORY
from shared.bus.redis_bus import RedisBus
from shared.kernel_cache import KERNEL_CACHE, kernel_cache
from tests.support.processes.redis_cluster import RedisCluster
from tests.support.walks.background import BackgroundWalks

# They take longest, and pytest-xdist gives a file to one process: begun last, they would be waited
# for by the other processes.
LONGEST_FILES = (
    "tests/kernels/triton/test_triton.py",
    "tests/gpu_worker/step/test_interpreted.py",
    "tests/deploy/test_launcher.py",
    "tests/real_model/test_preempted.py",
    "tests/real_model/test_served.py",
    "tests/real_model/test_served_by_two_workers.py",
    "tests/real_model/test_served_in_bfloat16.py",
    "tests/deploy/test_jobs.py",
    "tests/integration/test_tokens_equal_transformers.py",
    "tests/integration/test_api_fuzzing.py",
    "tests/gpu_worker/model/test_torch_compiled.py",
    "tests/benchmarks/simulator/test_mypyc_build.py",
)

_WALKS: pytest.StashKey[BackgroundWalks] = pytest.StashKey()
_WALKS_FOLDER = "WALKS_OF_PAGESTREAMS_TESTS"  # environments go on to xdist's workers


def pytest_configure(config: pytest.Config) -> None:
    """Say where the background walks leave what they find, and where kernels are kept."""
    # Where services that tests start keep theirs, so that none is compiled twice. Before numba is
    # imported, which reads it once.
    os.environ.setdefault(KERNEL_CACHE, str(kernel_cache()))
    if not hasattr(config, "workerinput"):
        os.environ[_WALKS_FOLDER] = tempfile.mkdtemp(prefix="pagestream-walks-")
    config.stash[_WALKS] = BackgroundWalks(Path(os.environ[_WALKS_FOLDER]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of the files that take longest."""
    places = {REPOSITORY / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes longest, if it was asked for: nothing else keeps two cores busy."""
    wanted = any("background_walks" in getattr(i, "fixturenames", ()) for i in session.items)
    if (
        wanted
        and not session.config.option.collectonly
        and not hasattr(session.config, "workerinput")
    ):
        session.config.stash[_WALKS].start()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """The same with pytest-xdist, whose first process collects nothing itself."""
    if node.gateway.id == "gw0" and any("a_million_random_steps" in test for test in ids):
        node.config.stash[_WALKS].start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing behind."""
    if not hasattr(config, "workerinput"):
        config.stash[_WALKS].stop()
        shutil.rmtree(os.environ[_WALKS_FOLDER], ignore_errors=True)


@pytest.fixture
def background_walks(request: pytest.FixtureRequest) -> BackgroundWalks:
    """A million random steps of the scheduler core, under way since the first test."""
    return request.config.stash[_WALKS]


@pytest.fixture
def unused_tcp_port() -> int:
    """A TCP port on which nothing listens now."""
    return free_port()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real server that lives as long as the test session."""
    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            configure(find_redis_server(), Endpoint(None, port), folder), stdout=log, stderr=log
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


@pytest.fixture(scope="session")
def cluster_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three primaries that live as long as the test session."""
    with ExitStack() as stack:
        yield RedisCluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture
def redis_cluster(cluster_servers: RedisCluster) -> RedisCluster:
    """The session's cluster, empty."""
    cluster_servers.flush()
    return cluster_servers
