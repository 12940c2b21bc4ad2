"""Services of earlier versions, taken from git, beside those of this version."""

import asyncio
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import redis

from deploy.redis.ports import free_port
from deploy.settings import REPOSITORY
from shared.bus.keys import EngineKeys
from shared.messages.leases import PROTOCOL

PREVIOUS = "0e7dc7b0c91d35b7b67cb18b4ad1a728cb1ee121"
"""The last version with the same protocol in which a gateway serves one engine only."""
OLDER_PROTOCOL = "a6e8d50a431f0c263029513d911cad923792427f"
"""The last version with protocol 2."""

PACKAGES = (
    "pyproject.toml",
    "gateway",
    "gpu_worker",
    "kernels",
    "models/demo",
    "scheduler_svc",
    "shared",
    "tests",
)
ENGINE = Path(__file__).with_name("engine.py")
READ_LEASE = """
import sys
from shared.codec import decode_as
from shared.messages.leases import EngineInfo, why_incompatible
print(why_incompatible("scheduler", decode_as(EngineInfo, sys.stdin.buffer.read()).protocol))
"""
DEADLINE_S = 60.0
NUM_STREAMS = 8
Start = Callable[..., "Process"]


class Process:
    """A process of some version."""

    def __init__(self, tree: Path, log: Path, *command: str) -> None:
        self._log = log
        environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, *command], cwd=tree, env=environ, stdout=output, stderr=output
            )

    def get(self, url: str, status: int) -> httpx.Response:
        """The first answer with this status."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline, self._log.read_text()
            assert self.popen.poll() is None, self._log.read_text()
            try:
                found = httpx.get(url)
            except httpx.TransportError:
                found = None
            if found is not None and found.status_code == status:
                return found
            time.sleep(0.05)  # polling interval of the condition


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(tree: Path, *command: str) -> Process:
            process = Process(tree, tmp_path / f"{free_port()}.log", *command)
            stack.callback(process.popen.wait)
            stack.callback(process.popen.kill)
            return process

        yield begin


def version_of(commit: str, folder: Path, packages: Sequence[str] = PACKAGES) -> Path:
    """The files of an earlier version."""
    archive = subprocess.run(
        ["git", "archive", commit, *packages], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"git history does not reach back to {commit:.7}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def gateway(start: Start, tree: Path, redis_url: str, engine: str) -> tuple[Process, str]:
    port = free_port()
    flags = ("--redis-url", redis_url, "--engine-id", engine, "--port", str(port))
    return start(tree, "-m", "gateway", *flags), f"http://127.0.0.1:{port}"


async def texts(url: str) -> list[str]:
    """The texts of streams that run at once."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        bodies = [
            {
                "model": "demo",
                "prompt": f"Stream {number}",
                "max_tokens": 60,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            for number in range(NUM_STREAMS)
        ]
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for body in bodies)
        )
    assert {answer.status_code for answer in answers} == {200}
    assert all("[DONE]" in answer.text for answer in answers), answers[0].text
    return ["".join(text_of(line) for line in answer.iter_lines()) for answer in answers]


def text_of(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    data = httpx.Response(200, content=line.removeprefix("data: ")).json()
    assert "error" not in data, line
    return "".join(choice["text"] for choice in data["choices"])


async def test_the_previous_version_and_this_one_serve_together_and_another_protocol_is_refused(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    previous = version_of(PREVIOUS, tmp_path / "previous")
    for tree, name in ((REPOSITORY, "of-this"), (previous, "of-previous")):
        start(tree, str(ENGINE), redis_url, name)
    gateways = [
        gateway(start, previous, redis_url, "of-this"),
        gateway(start, REPOSITORY, redis_url, "of-previous"),
    ]
    for process, url in gateways:
        process.get(f"{url}/health/ready", 200)
    found = await asyncio.gather(*(texts(url) for _, url in gateways))
    assert found[0] == found[1]
    assert len(set(found[0])) == NUM_STREAMS
    with redis.from_url(redis_url) as client:
        lease = client.get(EngineKeys("of-this").info)
    assert isinstance(lease, bytes)
    assert read_lease(version_of(OLDER_PROTOCOL, tmp_path / "older", ["shared"]), lease).startswith(
        f"the scheduler speaks protocol {PROTOCOL}, this process 2"
    )


def read_lease(tree: Path, lease: bytes) -> str:
    """What services of an earlier version find wrong with an engine's lease."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", READ_LEASE]
    done = subprocess.run(command, input=lease, env=environ, capture_output=True, check=True)
    return done.stdout.decode()
