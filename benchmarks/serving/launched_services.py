"""Runs all services by the launcher for the time of a measurement."""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.serving.processes import service_pid
from benchmarks.serving.server_process import ready_server
from deploy.settings import REPOSITORY
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable

SERVICES = ("redis", "scheduler", "worker", "gateway")
_START_S = 300.0  # the first start compiles kernels
_REDIS_START_S = 30.0


@contextmanager
def serving(
    folder: Path, port: int, flags: Sequence[str], module: str = "deploy.serve"
) -> Iterator[None]:
    """Run all services inside the block, with default settings beside ``flags``.

    Args:
        folder: for their state and their log.
        port: of the gateway.
        flags: of ``scripts/serve``, or of ``module``.
        module: the launcher.

    Raises:
        NotServed: they do not become ready.
    """
    command = [sys.executable, "-m", module, "--state-dir", str(folder)]
    command += ["--port", str(port), "--scheduler-metrics-port", "0", "--worker-metrics-port", "0"]
    environ = {
        name: text
        for name, text in os.environ.items()
        if name != "REDIS_URL" and not name.startswith("PAGESTREAM_")
    }
    environ |= {"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1"}
    log = folder / "serve.log"

    def is_ready() -> bool:
        return "] ready: " in log.read_text()

    with ready_server(module, [*command, *flags], environ, log, is_ready, _START_S):
        yield


async def answering(bus: RedisBus) -> None:
    """Wait until a Redis that was just started answers.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(_REDIS_START_S):
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
