"""Measures whether steps are made while there is work: health is progress, not a live port."""

import time
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler

_LEAST_S = 10.0  # what any machine may pause for
_MANY = 8  # times the longest step; a worker's lease, which it renews between steps, is shorter
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0


class Progress:
    """How long there has been work without a result, and how many epochs have ended like that.

    Args:
        clock_s: monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._applied_step = 0
        self._since_s = self._in_flight_since_s = clock_s()
        self._longest_s = 0.0
        self._has_work = False
        self._num_fruitless = 0  # epochs in a row that ended with work and without a result

    def start(self, core: Scheduler, expected_s: float) -> None:
        """An epoch begins; it is no progress by itself.

        Args:
            expected_s: of the longest step, by the speed that the worker has measured.
        """
        self._applied_step, self._has_work = 0, core.has_work
        self._in_flight_since_s = self._clock_s()
        if not core.has_work:
            self._since_s = self._in_flight_since_s
        self._longest_s = expected_s

    def stepped(self, seconds: float) -> None:
        """A result was read of a step that took so long."""
        self._longest_s = max(self._longest_s, seconds)
        self._num_fruitless = 0

    def update(self, core: Scheduler) -> None:
        """Take the state of the core, after every tick."""
        moved, now_s = core.applied_step != self._applied_step, self._clock_s()
        self._applied_step, self._has_work = core.applied_step, core.has_work
        if moved or not core.has_work:
            self._since_s = now_s
        if moved or core.applied_step == core.planned_step:
            self._in_flight_since_s = now_s

    def stalled_ms(self, core: Scheduler) -> int:
        """0 if there is nothing to do."""
        return int((self._clock_s() - self._since_s) * 1e3) if core.has_work else 0

    def is_stuck(self) -> bool:
        """A plan has had no result for so long that it, or its result, must be lost.

        Each time in a row that nothing has come of an epoch, this takes twice as long.
        """
        limit_s = (_LEAST_S + _MANY * self._longest_s) * 2.0 ** min(self._num_fruitless, 6)
        return self._clock_s() - self._in_flight_since_s >= limit_s

    def over(self) -> float:
        """An epoch has ended.

        Returns:
            Seconds to wait before the next one. What has ended several in a row will end that one,
            too; and each makes gateways ask for all that they deliver.
        """
        if self._applied_step > 0 or not self._has_work:
            self._num_fruitless = 0
            return 0.0
        self._num_fruitless += 1
        if self._num_fruitless == 1:
            return 0.0
        return min(_FIRST_PAUSE_S * 2.0 ** (self._num_fruitless - 2), _LONGEST_PAUSE_S)
