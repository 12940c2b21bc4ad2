"""Collects this process's signals, and waits for them."""

import math
import select
import signal
import socket
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from deploy.processes.spawner_messages import MessageReader

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# timeout(1) and process managers signal a process and its group, so that the signal arrives twice.
_ONE_STOP_S = 0.3


class Signals:
    """While entered, signals interrupt nothing; ``wait`` collects them. Main thread only.

    The end of a child wakes ``wait`` up too. After leaving, signals to stop are ignored.
    """

    def __init__(self) -> None:
        self.num_stops = 0
        self._last_stop = -math.inf

    def __enter__(self) -> "Signals":
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGCHLD):
            signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # All services have ended: another Ctrl-C must not make an error of this process's exit.
        for number in _STOP:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self._read_end.close()
        self._write_end.close()

    def wait(self, timeout_s: float, messages: Sequence[MessageReader] = ()) -> None:
        """Wait until a signal or a message arrives, or the time has passed.

        ``num_stops`` counts the signals to stop.
        """
        ends = [self._read_end.fileno(), *(found.fileno() for found in messages)]
        readable = select.select(ends, [], [], max(0.0, timeout_s))[0]
        if self._read_end.fileno() in readable:
            received = self._read_end.recv(4096)
            now = time.monotonic()
            if any(number in _STOP for number in received) and now - self._last_stop > _ONE_STOP_S:
                self.num_stops += 1
                self._last_stop = now


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the signal to the wake-up socket."""
