"""Imports a service's modules once, then forks the service, and forks it again whenever it dies.

    python -m deploy.processes.spawner gpu_worker [FLAGS OF THE SERVICE]

Most of the time in which a service starts goes into Python's imports, several seconds for a
worker. A fork has the modules already, so that a killed service is back in about a second.

The ``__main__`` of a package that can be spawned has

    prepare()     reads settings, sets up logs, imports everything; opens and starts nothing
    main(ready)   runs the service, calls ``ready`` when it works, returns its exit code

A fork copies only the thread that forks, so no other one may have been started: no event loop, no
OpenMP, no CUDA. The spawner checks this; a process with threads runs the service itself.

The service dies with the spawner. The spawner ends when the service has ended after a signal to
stop, or with an exit code that a fork cannot mend, and exits with the service's code. If a signal
ends the service alone, it is forked again, whatever its exit code.
"""

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from deploy.processes.die_with_parent import die_with
from deploy.processes.exit_codes import FUTILE_EXIT_CODES, describe_exit
from deploy.processes.spawner_messages import DIED, READY, write_message
from shared.logs import EventLog

Main = Callable[[Callable[[], None]], int]

_STOP = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_STOP, signal.SIGHUP)
_SIGNALS = (*_PASSED_ON, signal.SIGCHLD)
_FIRST_DELAY_S = 0.1
_FORK_EVERY_S = 0.5  # at most, however long the process before was healthy
# If a service never becomes ready, the cause may be in the modules that the spawner has imported.
_MOST_FAILURES = 5
_SIGNAL_EXIT = 128  # shells report a signal as 128 + its number

log = EventLog(__name__)


class Spawner:
    """Keeps one process of a service running.

    Args:
        main: runs the service in a process that was forked for it.
    """

    def __init__(self, main: Main) -> None:
        self._main = main
        self._stopping = False
        self._num_failures = 0  # processes in a row that died before they were ready
        self._death = ""  # how the last process ended
        self._died_s = 0.0
        self._forked_s = 0.0

    def run(self) -> int:
        """Fork, wait, and fork again. Main thread only.

        Returns:
            The exit code. Forked processes do not return.
        """
        if not can_fork():
            log.warning("there are threads, so that nothing can be forked: a restart takes longer")
            return self._main(lambda: None)
        # Freezing keeps shared pages shared: a garbage collection would write into them.
        # Collecting before would take half a second and find next to nothing.
        gc.freeze()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        while True:
            read_end, write_end = os.pipe()
            parent, self._forked_s = os.getpid(), time.monotonic()
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                _end_at_once(self._serve(parent, write_end))
            os.close(write_end)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # the child does the same; one of the two calls is too late
            code = self._wait(pid)
            was_ready = _has_byte(read_end)
            os.close(read_end)
            if not self._should_fork(pid, code, was_ready):
                return code if code >= 0 else _SIGNAL_EXIT - code

    def _serve(self, parent: int, write_end: int) -> int:
        """Run the service in a process group of its own; the spawner passes Ctrl-C on."""
        die_with(parent)
        os.setpgid(0, 0)
        for number in _STOP:
            signal.signal(number, lambda *_: sys.exit(0))  # until the service sets its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

        def ready() -> None:
            with contextlib.suppress(BrokenPipeError):
                os.write(write_end, b"\n")
            os.close(write_end)
            write_message(os.environ, READY)
            if self._death:
                after_s = round(time.monotonic() - self._died_s, 2)
                log.info("back", after_s=after_s, predecessor=self._death)

        return self._main(_once(ready))

    def _wait(self, pid: int) -> int:
        """Pass signals on until the process has ended; its exit code, or minus its signal."""
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)  # in a container also orphans
            if ended == pid:
                return os.waitstatus_to_exitcode(status)
            if not ended:
                self._handle_signal(signal.sigwait(_SIGNALS), pid)

    def _handle_signal(self, number: int, pid: int) -> None:
        if number in _STOP:
            self._stopping = True
        if number in _PASSED_ON:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _should_fork(self, pid: int, code: int, was_ready: bool) -> bool:
        """Whether to fork another process; waits until it is time to."""
        self._death, self._died_s = describe_exit(code), time.monotonic()
        if self._stopping or code in FUTILE_EXIT_CODES or (code == 0 and not was_ready):
            return False
        self._num_failures = 0 if was_ready else self._num_failures + 1
        if self._num_failures >= _MOST_FAILURES:
            log.error("died", pid=pid, how=self._death, in_a_row=self._num_failures)
            return False
        delay_s = max(0.0, _FORK_EVERY_S - (self._died_s - self._forked_s))
        if not was_ready:
            delay_s = max(delay_s, _FIRST_DELAY_S * 2 ** (self._num_failures - 1))
        next_s = round(delay_s, 2)
        log.warning("died", pid=pid, how=self._death, was_ready=was_ready, next_start_s=next_s)
        write_message(os.environ, f"{DIED} {self._death}")
        return not self._stop_requested(delay_s)

    def _stop_requested(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while True:
            received = signal.sigtimedwait(_PASSED_ON, max(0.0, until_s - time.monotonic()))
            if received is None:
                return False
            if received.si_signo in _STOP:
                return True


def can_fork() -> bool:
    """Whether this process has a single thread, counting those of libraries."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


def main() -> int:
    """Prepare and spawn the service; its exit code."""
    if len(sys.argv) < 2:
        print(
            "usage: python -m deploy.processes.spawner PACKAGE [FLAGS OF THE SERVICE]",
            file=sys.stderr,
        )
        return 2
    for number in _STOP:
        signal.signal(number, lambda *_: sys.exit(0))
    del sys.argv[0]
    gc.disable()  # collections during imports took a seventh of a worker's start
    _import_numpy()
    service = importlib.import_module(f"{sys.argv[0]}.__main__")
    service.prepare()
    gc.enable()
    return Spawner(service.main).run()


def _import_numpy() -> None:
    """Import numpy with one OpenBLAS thread; OpenBLAS would start more at import."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    importlib.import_module("numpy")
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


def _end_at_once(code: int) -> NoReturn:
    """End a forked service after it has closed its connections and files.

    The interpreter's own shutdown would free all imported objects one by one. For a worker that
    takes seconds, by which its successor would start later.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _has_byte(pipe_end: int) -> bool:
    os.set_blocking(pipe_end, False)
    try:
        return bool(os.read(pipe_end, 1))
    except BlockingIOError:
        return False


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``action`` the first time, and does nothing afterwards."""
    actions = [action]

    def do() -> None:
        while actions:
            actions.pop()()

    return do


if __name__ == "__main__":
    sys.exit(main())
