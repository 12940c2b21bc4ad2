"""A launcher with real services, as a user would start it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.redis.ports import free_port
from deploy.settings import REPOSITORY

READY_DEADLINE_S = 120.0  # the first start compiles the kernels
STOP_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 60.0
SERVICES = ("redis", "scheduler", "worker", "gateway")


class Running:
    """``scripts/serve`` without installing anything, on ports and in a folder of its own."""

    def __init__(self, folder: Path, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.state = folder / "state"
        self.port = free_port()
        self.metrics = {"scheduler": free_port(), "worker": free_port()}
        self._output = folder / "output"
        self._command = [
            *(sys.executable, "-m", "deploy.serve"),
            *("--state-dir", str(self.state), "--port", str(self.port)),
            *("--scheduler-metrics-port", str(self.metrics["scheduler"])),
            *("--worker-metrics-port", str(self.metrics["worker"])),
            *flags,
        ]
        self._environ = outside() | (environ or {})
        self.start()

    def start(self) -> None:
        """Start the launcher, for the first time or again."""
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def output(self) -> str:
        """The launcher's output since it was started."""
        return self._output.read_text()

    def until(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen\n{self.story()}"
            time.sleep(0.05)  # polling interval of the condition

    def until_ready(self) -> float:
        """Seconds until the launcher printed that it is ready."""
        start = time.monotonic()

        def settled() -> bool:
            return self.process.poll() is not None or "] ready: " in self.output()

        self.until(settled, READY_DEADLINE_S, "ready")
        assert self.process.poll() is None, self.story()
        return time.monotonic() - start

    def pid(self, service: str) -> int:
        return int((self.state / "run" / f"{service}.pid").read_text())

    def pids(self) -> dict[str, int]:
        return {service: self.pid(service) for service in SERVICES}

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 30.0) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self) -> str:
        """Text of a completion, which is retried while it is refused."""
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        texts: list[str] = []

        def answered() -> bool:
            try:
                status, answer = self.post("/v1/completions", body)
            except OSError:
                return False  # the gateway does not listen
            assert status in (200, 503), (status, answer)
            if status == 200:
                texts.append(answer["choices"][0]["text"])
            return status == 200

        self.until(answered, ANSWER_DEADLINE_S, "an answer")
        return texts[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(STOP_DEADLINE_S)

    def close(self) -> None:
        """End all processes, in whatever state the test left them."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_DEADLINE_S)

    def story(self) -> str:
        """All output and logs, for a failing test."""
        logs = [
            f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:])
            for path in sorted((self.state / "log").glob("*.log"))
        ]
        return "\n".join(["--- launcher", self.output(), *logs])


def outside() -> dict[str, str]:
    """This environment without any PageStream setting."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("PAGESTREAM_")}
    found.pop("REDIS_URL", None)
    return found


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return process_state(pid) not in "ZX"


def forked_by(pid: int) -> int | None:
    """The process that a spawner has forked, if there is one."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(found[0]) if found else None


def ready_lines(text: str) -> Sequence[str]:
    """The lines in which the launcher reports that it is ready."""
    return re.findall(r"^\[ *[\d.]+s\] ready: .*$", text, re.MULTILINE)
