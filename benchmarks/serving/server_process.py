"""Processes that run for the time of a measurement, and end with it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import PageStreamError

_POLL_S = 0.2
_STOP_S = 120.0  # the launcher's own limits for its services add up to less
_LOG_CHARS = 2_000


class NotServed(PageStreamError):
    """A server did not become ready."""


@contextmanager
def ready_server(
    name: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    is_ready: Callable[[], bool],
    start_s: float,
    stop_s: float = _STOP_S,
) -> Iterator[None]:
    """Run a server inside the block, which begins when the server is ready.

    Args:
        name: for errors.
        log: file for its output.
        is_ready: called repeatedly until it returns true.
        start_s: longest time until it is ready.
        stop_s: longest time from SIGTERM to its end; then it is killed.

    Raises:
        NotServed: it ended, or was not ready in time; with the end of its log.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + start_s
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = log.read_text(errors="replace")[-_LOG_CHARS:]
                raise NotServed(f"{name} does not become ready:\n{tail}")
            time.sleep(_POLL_S)  # polling interval of the condition
        yield
    finally:
        end(process, stop_s)


def end(process: subprocess.Popen[bytes], stop_s: float = _STOP_S) -> None:
    """Terminate a process; kill it if it does not end in time, and what is left of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(stop_s)
    process.kill()
    with suppress(ProcessLookupError):  # no process is left, or it has no session of its own
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
