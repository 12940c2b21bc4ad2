"""Has a service's imports done, and forks the service: again whenever it dies.

    python -m deploy.processes.spawner gpu_worker [FLAGS OF THE SERVICE]

Most of the time in which a service starts goes into Python's imports, several seconds for a
worker. A fork has them done, so that a service that was killed is back in about a second.

A package that can be spawned has in its ``__main__``

    prepare()     reads the settings, sets up logs and imports everything; opens and starts nothing
    main(ready)   runs the service, calls ``ready`` when it does its work, returns its exit code

A fork copies only the thread that forks, so nothing may have started another one: no event loop,
no OpenMP, no CUDA. That is looked at, and a process with threads becomes the service itself.

The service dies with the spawner. The spawner ends after a signal to stop, once the service has
ended, or when the service ends in a way that a fork does not mend. It exits with the service's
code. A signal to the service alone is a death like any other, however well it ends.
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
from deploy.processes.spawner_messages import DIED, READY, tell
from shared.logs import EventLog

Main = Callable[[Callable[[], None]], int]

_STOP = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_STOP, signal.SIGHUP)
_HEARD = (*_PASSED_ON, signal.SIGCHLD)
_FIRST_DELAY_S = 0.1
_FORK_EVERY_S = 0.5  # at most, however well its predecessor was
# One that never gets ready may suffer from what this process has imported.
_MOST_FAILURES = 5
_SIGNAL_EXIT = 128  # a shell's way to tell a signal by an exit code

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
        self._death = ""  # how the last one ended
        self._died_s = 0.0
        self._forked_s = 0.0

    def run(self) -> int:
        """Fork, wait, fork again. Main thread only.

        Returns:
            The exit code. Forked processes do not return.
        """
        if not can_fork():
            log.warning("there are threads, so that nothing can be forked: a restart takes longer")
            return self._main(lambda: None)
        # What is shared stays shared: collections would write into it. Looking for garbage first
        # would take half a second and find next to none.
        gc.freeze()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        while True:
            ready_end, told_end = os.pipe()
            parent, self._forked_s = os.getpid(), time.monotonic()
            pid = os.fork()
            if pid == 0:
                os.close(ready_end)
                _end_at_once(self._serve(parent, told_end))
            os.close(told_end)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # it does the same; whoever is first
            code = self._wait(pid)
            was_ready = _has_byte(ready_end)
            os.close(ready_end)
            if not self._is_to_fork(pid, code, was_ready):
                return code if code >= 0 else _SIGNAL_EXIT - code

    def _serve(self, parent: int, told_end: int) -> int:
        """The service, in a group of its own: a terminal's Ctrl-C comes once, from the spawner."""
        die_with(parent)
        os.setpgid(0, 0)
        for number in _STOP:
            signal.signal(number, lambda *_: sys.exit(0))  # until the service takes them over
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)

        def ready() -> None:
            with contextlib.suppress(BrokenPipeError):
                os.write(told_end, b"\n")
            os.close(told_end)
            tell(os.environ, READY)
            if self._death:
                after_s = round(time.monotonic() - self._died_s, 2)
                log.info("back", after_s=after_s, predecessor=self._death)

        return self._main(_once(ready))

    def _wait(self, pid: int) -> int:
        """Pass signals on until the process has ended; its exit code or minus its signal."""
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)  # in a container orphans are ours, too
            if ended == pid:
                return os.waitstatus_to_exitcode(status)
            if not ended:
                self._hear(signal.sigwait(_HEARD), pid)

    def _hear(self, number: int, pid: int) -> None:
        if number in _STOP:
            self._stopping = True
        if number in _PASSED_ON:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_to_fork(self, pid: int, code: int, was_ready: bool) -> bool:
        """Whether another process is to be forked; waits until it is time."""
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
        tell(os.environ, f"{DIED} {self._death}")
        return not self._is_told_to_stop(delay_s)

    def _is_told_to_stop(self, within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while True:
            heard = signal.sigtimedwait(_PASSED_ON, max(0.0, until_s - time.monotonic()))
            if heard is None:
                return False
            if heard.si_signo in _STOP:
                return True


def can_fork() -> bool:
    """Whether this process has no second thread, of Python or of a library."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


def main() -> int:
    """Exit code of the service."""
    if len(sys.argv) < 2:
        print(
            "usage: python -m deploy.processes.spawner PACKAGE [FLAGS OF THE SERVICE]",
            file=sys.stderr,
        )
        return 2
    for number in _STOP:
        signal.signal(number, lambda *_: sys.exit(0))
    del sys.argv[0]
    gc.disable()  # imports make half a million objects that stay: a seventh of a worker's start
    _import_numpy()
    service = importlib.import_module(f"{sys.argv[0]}.__main__")
    service.prepare()
    gc.enable()
    return Spawner(service.main).run()


def _import_numpy() -> None:
    """Its OpenBLAS starts threads at once if there may be more than one; nobody needs it."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    importlib.import_module("numpy")
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


def _end_at_once(code: int) -> NoReturn:
    """End a forked service that has closed all that it had opened.

    The interpreter's own end would take apart all that was imported, object by object: seconds
    for a worker, in which its successor could have been started.
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
    """The same, doing nothing from the second time on."""
    actions = [action]

    def do() -> None:
        while actions:
            actions.pop()()

    return do


if __name__ == "__main__":
    sys.exit(main())
