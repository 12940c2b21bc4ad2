"""``python -m gateway`` as a process."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.bus.redis_bus import RedisBus
from tests.gateway.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
Start = Callable[..., "Process"]


class Process:
    """A gateway that runs by itself."""

    def __init__(self, *flags: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--port", "0", *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        self.said = ""

    def wait_for(self, pattern: str) -> "re.Match[str]":
        assert self.popen.stderr is not None
        while (found := re.search(pattern, self.said)) is None:
            line = self.popen.stderr.readline()
            assert line, self.said
            self.said += line
        return found

    def url(self) -> str:
        return self.wait_for(r"url=(http://\S+)")[1]

    def wait(self) -> int:
        assert self.popen.stderr is not None
        self.said += self.popen.stderr.read()
        return self.popen.wait(20)


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def begin(*flags: str) -> Process:
        process = Process(*flags)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stderr is not None
        process.popen.stderr.close()


def test_an_idle_gateway_does_without_torch_and_ends_with_status_0(start: Start) -> None:
    process = start("--redis-url", "redis://127.0.0.1:1/0")
    url = process.url()
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "torch" not in maps
    assert "PyTorch" not in process.said
    assert httpx.get(f"{url}/health/live").status_code == 200
    ready = httpx.get(f"{url}/health/ready")
    assert ready.status_code == 503
    assert "Redis" in ready.json()["detail"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.said


async def test_a_second_signal_ends_a_draining_gateway_at_once(
    start: Start, redis_url: str
) -> None:
    bus = RedisBus(redis_url)
    engine = FakeEngine(bus)
    await engine.start_epoch()
    await engine.publish()
    process = start("--redis-url", redis_url)
    async with httpx.AsyncClient(base_url=process.url()) as http:
        deadline = time.monotonic() + 10
        while (await http.get("/health/ready")).status_code != 200:
            assert time.monotonic() < deadline
        body: dict[str, Any] = {"model": "demo", "prompt": "Hi", "stream": True}
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await engine.accept_next()
        process.popen.send_signal(signal.SIGINT)
        process.wait_for("draining open_requests=1")
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        with pytest.raises(httpx.HTTPError):
            await waiting
    await bus.close()


def test_a_port_that_is_taken_is_a_failure(start: Start) -> None:
    first = start("--redis-url", "redis://127.0.0.1:1/0")
    port = first.url().rpartition(":")[2]
    second = start("--redis-url", "redis://127.0.0.1:1/0", "--port", port)
    assert second.wait() == 1


def test_a_bad_setting_is_refused_by_name(start: Start) -> None:
    process = start("--max-body-bytes", "many")
    assert process.wait() == 2
    assert "--max-body-bytes='many'" in process.said


def test_a_file_of_prefixes_that_cannot_be_used_ends_the_process(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text('{"prompt": "good"}\n{"prompt": 7}\n')
    process = start("--redis-url", "redis://127.0.0.1:1/0", "--pinned-prefixes", str(file))
    assert process.wait() == 2
    assert f"--pinned-prefixes='{file}': line 2: prompt=7" in process.said


def test_without_a_tokenizer_it_stays_up_and_says_why(
    start: Start, tmp_path: Path, unused_tcp_port: int
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    process = start("--model", str(tmp_path), "--port", str(unused_tcp_port))
    process.wait_for("answering 503")
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        assert client.get(f"{url}/health/live").status_code == 200
        assert client.get(f"{url}/health/ready").status_code == 503
        refused = client.post(f"{url}/v1/completions", json={"model": "bloom", "prompt": "x"})
        assert "admission_rejections" in client.get(f"{url}/metrics").text
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "no tokenizer" in refused.json()["error"]["message"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 1, process.said
