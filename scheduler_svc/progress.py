"""Whether steps are made while there is work: health is progress, not a live port."""

import time
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler


class Progress:
    """How long there has been work without a step.

    Args:
        clock_s: monotonic time.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._applied_step = 0
        self._since_s = clock_s()

    def start(self) -> None:
        """An epoch begins."""
        self._applied_step = 0
        self._since_s = self._clock_s()

    def note(self, core: Scheduler) -> None:
        """Look at the core: after every turn."""
        if core.applied_step != self._applied_step or not core.has_work:
            self._applied_step = core.applied_step
            self._since_s = self._clock_s()

    def stalled_ms(self, core: Scheduler) -> int:
        """0 if there is nothing to do."""
        return int((self._clock_s() - self._since_s) * 1e3) if core.has_work else 0
