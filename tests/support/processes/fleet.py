"""Engines and gateways of a fleet as real processes; an engine's services share one."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server
from deploy.settings import REPOSITORY
from tests.upgrade.test_upgrade import DEADLINE_S, ENGINE, text_of

__all__ = ["DEADLINE_S", "Processes", "text_of", "wait_for"]


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

    def start_redis(self, name: str) -> str:
        port = free_port()
        server = ("--port", str(port), "--save", "", "--bind", "127.0.0.1")
        self.start(name, find_redis_server(), *server)
        return f"redis://127.0.0.1:{port}"

    def start_engine(self, name: str, redis_url: str, directory_url: str) -> None:
        self.start(name, sys.executable, str(ENGINE), redis_url, name, directory_url)

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
