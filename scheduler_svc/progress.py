"""Whether steps are made while there is work: health is progress, not a live port."""

import time
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler

_LEAST_S = 10.0  # what any machine may pause for
_MANY = 8  # times the longest step; a worker's lease, which it renews between steps, is shorter


class Progress:
    """How long there has been work without a step, and whether that is too long.

    Args:
        clock_s: monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._applied_step = 0
        self._since_s = self._in_flight_since_s = clock_s()
        self._longest_s = 0.0
        self._num_stuck = 0  # epochs in a row that ended without a result

    def start(self, expected_s: float) -> None:
        """An epoch begins.

        Args:
            expected_s: of the longest step, by the speed that the worker has measured.
        """
        self._applied_step = 0
        self._since_s = self._in_flight_since_s = self._clock_s()
        self._longest_s = expected_s

    def stepped(self, seconds: float) -> None:
        """A result was read of a step that took so long."""
        self._longest_s = max(self._longest_s, seconds)
        self._num_stuck = 0

    def note(self, core: Scheduler) -> None:
        """Look at the core: after every turn."""
        moved, now_s = core.applied_step != self._applied_step, self._clock_s()
        self._applied_step = core.applied_step
        if moved or not core.has_work:
            self._since_s = now_s
        if moved or core.applied_step == core.planned_step:
            self._in_flight_since_s = now_s

    def stalled_ms(self, core: Scheduler) -> int:
        """0 if there is nothing to do."""
        return int((self._clock_s() - self._since_s) * 1e3) if core.has_work else 0

    def is_stuck(self) -> bool:
        """A plan has had no result for so long that it, or its result, must be lost.

        Each time in a row that nothing has come of a new epoch, this takes twice as long.
        """
        limit_s = (_LEAST_S + _MANY * self._longest_s) * 2**self._num_stuck
        if self._clock_s() - self._in_flight_since_s < limit_s:
            return False
        self._num_stuck += 1
        return True
