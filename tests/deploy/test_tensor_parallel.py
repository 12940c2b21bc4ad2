"""``scripts/serve --tensor-parallel-size 2``: two workers with a part of the model each."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.redis.ports import free_port
from deploy.settings import REPOSITORY
from tests.deploy.running import Running, forked_by, outside

_BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 150, "temperature": 0}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--num-blocks", "256")
    found = Running(tmp_path_factory.mktemp("ranks"), *flags)
    found.until_ready()
    yield found
    found.close()


def metric(port: int, name: str) -> float:
    """The value of a gauge or counter of a worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        page = response.read().decode()
    found = re.search(rf"^pagestream:{name}\{{.*\}} (\S+)$", page, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def metrics_port(running: Running, name: str) -> int:
    """The metrics port of a worker, from its spawner's environment."""
    environ = Path(f"/proc/{running.pid(name)}/environ").read_text()
    found = re.search(r"PAGESTREAM_WORKER_METRICS_PORT=(\d+)", environ)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("killed", ["worker-1", "worker"])
def test_a_text_is_the_same_when_a_rank_is_killed_while_it_is_generated(
    running: Running, killed: str
) -> None:
    status, expected = running.post("/v1/completions", _BODY)
    assert status == 200
    port = metrics_port(running, "worker")
    pid = forked_by(running.pid(killed))
    assert pid is not None
    with ThreadPoolExecutor(1) as thread:
        before = metric(port, "worker_steps_total")
        answer = thread.submit(running.post, "/v1/completions", _BODY, 120.0)
        running.until(lambda: metric(port, "worker_steps_total") > before + 20, 60, "20 steps")
        os.kill(pid, signal.SIGKILL)
        status, found = answer.result()
    assert status == 200, running.story()
    assert found["choices"][0]["text"] == expected["choices"][0]["text"]
    assert forked_by(running.pid(killed)) != pid


def test_each_rank_has_a_part_of_the_weights_and_a_metrics_port(running: Running) -> None:
    ports = {metrics_port(running, name) for name in ("worker", "worker-1")}
    assert len(ports) == 2
    first, second = (metric(port, "worker_weight_bytes") for port in ports)
    assert first == second > 0
    assert all(metric(port, "worker_sums_seconds_count") > 0 for port in ports)


def test_everything_ends_with_exit_code_zero(running: Running) -> None:
    assert running.stop() == 0, running.story()


def test_a_rank_is_no_setting_of_a_launcher_that_starts_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.serve", "--state-dir", str(tmp_path)]
    found = subprocess.run(
        [*command, "--port", str(free_port()), "--tensor-parallel-size", "2", "--rank", "1"],
        cwd=REPOSITORY,
        env=outside(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 2
    assert "--rank" in found.stderr
    assert "starts the workers of all ranks" in found.stderr
