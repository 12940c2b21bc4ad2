"""Kills a gateway, an engine and the engine's Redis at once; all of them are real processes.

The engine's scheduler and worker share a process. The client comes back by the stream's URL.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server
from deploy.settings import REPOSITORY
from tests.upgrade.test_upgrade import DEADLINE_S, ENGINE, text_of

BODY = {
    "model": "demo",
    "prompt": "Once",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
}
NUM_SEEN = 20  # events


class Processes:
    """Processes of a fleet, by name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.log").open("w") as log:
            environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, env=environ)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.by_name[name] = process

    def start_engine(self, name: str, directory_url: str) -> None:
        port = free_port()
        server = ("--port", str(port), "--save", "", "--bind", "127.0.0.1")
        self.start(f"{name}-redis", find_redis_server(), *server)
        url = f"redis://127.0.0.1:{port}"
        self.start(name, sys.executable, str(ENGINE), url, name, directory_url)

    def start_gateway(self, name: str, directory_url: str) -> str:
        port = free_port()
        urls = ("--redis-url", directory_url, "--directory-url", directory_url)
        flags = (
            *urls,
            "--port",
            str(port),
            "--engine-patience",
            "1",
            "--gateway-metrics-port",
            "0",
        )
        self.start(name, sys.executable, "-m", "gateway", *flags)
        return f"http://127.0.0.1:{port}"

    def kill(self, *names: str) -> None:
        for name in names:
            self.by_name[name].kill()
        for name in names:
            self.by_name[name].wait()

    def logs(self) -> str:
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-1_500:]}" for file in files)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path, stack)


def seen_of(url: str) -> tuple[str, str, str, str]:
    """The beginning of a stream: its text, its URL, its engine and the id of the last event."""
    text, event_id = "", ""
    body = BODY | {"stream": True, "stream_resume": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        num_events = 0
        for line in answer.iter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            text += text_of(line)
            num_events += line.startswith("data: {")
            if num_events == NUM_SEEN:
                break
        engine = answer.headers["x-engine"].partition(";")[0]
        return text, answer.headers["x-stream-url"], engine, event_id


def wait_for(url: str, processes: Processes) -> None:
    """Return when a gateway is ready."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline, processes.logs()
        ended = [name for name, found in processes.by_name.items() if found.poll() is not None]
        assert not ended, processes.logs()
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)  # polling interval of the condition


def test_a_stream_goes_on_though_its_gateway_and_engine_and_redis_are_killed_together(
    processes: Processes, redis_url: str
) -> None:
    engines = ("engine-0", "engine-1")
    for name in engines:
        processes.start_engine(name, redis_url)
    urls = [processes.start_gateway(f"gateway-{number}", redis_url) for number in range(2)]
    for url in urls:
        wait_for(url, processes)
    text, stream_url, engine, event_id = seen_of(urls[0])
    processes.kill("gateway-0", engine, f"{engine}-redis")
    headers = {"Last-Event-ID": event_id}
    path = httpx.URL(stream_url).path
    rest = httpx.get(f"{urls[1]}{path}", headers=headers, timeout=DEADLINE_S)
    assert rest.status_code == 200, f"{rest.text}\n{processes.logs()}"
    assert "data: [DONE]" in rest.text, f"{rest.text}\n{processes.logs()}"
    text += "".join(map(text_of, rest.iter_lines()))
    whole = httpx.post(f"{urls[1]}/v1/completions", json=BODY, timeout=DEADLINE_S)
    assert whole.headers["x-engine"].partition(";")[0] == ({*engines} - {engine}).pop()
    assert text == whole.json()["choices"][0]["text"]
