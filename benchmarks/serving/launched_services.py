"""Runs all services by the launcher for the time of a measurement."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.serving.processes import service_pid
from deploy.settings import REPOSITORY
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, PageStreamError

SERVICES = ("redis", "scheduler", "worker", "gateway")
_READY_DEADLINE_S = 300.0


class NotServed(PageStreamError):
    """The services did not become ready."""


@contextmanager
def serving(folder: Path, port: int, flags: Sequence[str]) -> Iterator[None]:
    """Run all services inside the block.

    Args:
        folder: for their state and their log.
        port: of the gateway.
        flags: of ``scripts/serve``.

    Raises:
        NotServed: they do not become ready.
    """
    command = [sys.executable, "-m", "deploy.serve", "--state-dir", str(folder)]
    command += ["--port", str(port), "--scheduler-metrics-port", "0", "--worker-metrics-port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    environ.pop("REDIS_URL", None)
    with (folder / "serve.log").open("w+") as log:
        launcher = subprocess.Popen([*command, *flags], env=environ, stdout=log, stderr=log)
        try:
            until_s = time.monotonic() + _READY_DEADLINE_S
            while "ready: " not in (folder / "serve.log").read_text():
                if launcher.poll() is not None or time.monotonic() > until_s:
                    raise NotServed((folder / "serve.log").read_text()[-2_000:])
                time.sleep(0.2)  # polling interval of the condition
            yield
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()


async def answering(bus: RedisBus) -> None:
    """Wait until a Redis that was just started answers."""
    while True:
        try:
            await bus.check_server()
            return
        except BusUnavailable:
            await asyncio.sleep(0.02)  # polling interval of the condition


def service_pids(folder: Path) -> Mapping[str, int]:
    """Process ids of the services, without those of their spawners.

    Args:
        folder: as given to ``serving``.

    Raises:
        OSError: a process has ended.
    """
    files = {name: folder / "run" / f"{name}.pid" for name in SERVICES}
    return {name: service_pid(int(file.read_text())) for name, file in files.items()}
