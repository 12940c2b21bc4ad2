"""The state folder of one launcher.

run/serve.pid          the launcher; locked while it runs
run/<service>.pid      its services
run/redis.url          URL of the Redis that they use, or used last
log/<service>.log      their output since this start; older output in <service>.log.1 to .3
redis/                 data of the launcher's own Redis, kept between starts
"""

import fcntl
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from deploy.log_files import rotate
from shared.errors import PageStreamError
from shared.state_folder import redis_url_file

_LEFTOVER_DEADLINE_S = 15.0
# A pid file is written right after its process starts, and process start times have a resolution of
# 10 ms. If the two are farther apart, the id has been reused by another process.
_SAME_START_S = 2.0


class StateDir:
    """Exclusive use of a state folder, as a context manager.

    Raises (on entering):
        PageStreamError: another launcher uses it, it cannot be written, or a service of an earlier
            start cannot be ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> "StateDir":
        try:
            if not self.path.exists():
                self.path.mkdir(mode=0o700, parents=True)
            for folder in (self.path / "run", self.path / "log", self.redis):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700)  # prompts, passwords
            self._lock = (self.path / "run" / "serve.pid").open("a+")
        except OSError as error:
            raise PageStreamError(f"cannot use the state folder {self.path}: {error}") from None
        self._claim(self._lock)
        try:
            for pid_file in (self.path / "run").glob("*.pid"):
                if pid_file.name != "serve.pid":
                    _end_leftover(pid_file)
            for log in (self.path / "log").glob("*.log"):
                rotate(log)
        except BaseException:
            self._release(self._lock)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._release(self._lock)

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    def log(self, service: str) -> Path:
        return self.path / "log" / f"{service}.log"

    def pid_file(self, service: str) -> Path:
        return self.path / "run" / f"{service}.pid"

    def record_redis_url(self, url: str) -> None:
        """Write the URL of the Redis in use, with its password, to a file for its user alone."""
        file = redis_url_file(self.path)
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f"{url}\n")

    def _claim(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise PageStreamError(
                f"the state folder {self.path} is in use by process {owner}: stop that one, or "
                "give this server a --port (or a --state-dir) of its own"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()

    @staticmethod
    def _release(lock: IO[str]) -> None:
        lock.truncate(0)
        lock.close()


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    session: int
    started: float  # Unix time in seconds, to about 10 ms
    has_ended: bool


def _end_leftover(pid_file: Path) -> None:
    """Remove the pid file of an earlier start, and end the service if it still runs."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        pid_file.unlink(missing_ok=True)
        return
    written = pid_file.stat().st_mtime
    deadline = time.monotonic() + _LEFTOVER_DEADLINE_S
    while left := _left_of(pid, written):
        if pid in left:
            try:
                os.killpg(pid, signal.SIGKILL)  # each service leads a process group
            except ProcessLookupError:
                pass
            except PermissionError as error:
                raise PageStreamError(
                    f"process {pid} of an earlier start cannot be ended: {error.strerror} "
                    f"({pid_file})"
                ) from None
        if time.monotonic() > deadline:
            raise PageStreamError(
                f"process {left[0]} of an earlier start does not end ({pid_file})"
            )
        time.sleep(0.02)  # it is not a child of this process, so there is nothing to wait on
    pid_file.unlink(missing_ok=True)


def _left_of(leader: int, written: float) -> list[int]:
    """Ids of the remaining processes of the service whose first process started at ``written``.

    A service that a spawner forked is killed when the spawner has ended, and holds its ports until
    all its memory is freed. It is found by its session, whose id is not reused while the session
    has members.
    """
    boot = _boot_time()
    first = _look(leader, boot)
    if written < boot or (first and abs(first.started - written) >= _SAME_START_S):
        return []  # the id was reused by another process
    processes = (_look(int(path.name), boot) for path in Path("/proc").glob("[1-9]*"))
    return [
        process.pid
        for process in processes
        if process
        and process.session == leader
        and process.started > written - _SAME_START_S
        and not process.has_ended
    ]


def _boot_time() -> float:
    """When this machine started, in Unix time; infinity if there is no /proc."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, StopIteration):
        return math.inf


def _look(pid: int, boot: float) -> _Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    state, session, num_threads, ticks = fields[0], *map(int, (fields[3], fields[17], fields[19]))
    # A zombie of which other threads still exist holds its ports.
    has_ended = state == "Z" and num_threads <= 1
    return _Process(pid, session, boot + ticks / os.sysconf("SC_CLK_TCK"), has_ended)
