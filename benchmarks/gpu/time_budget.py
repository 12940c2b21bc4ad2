"""Keeps track of a run's remaining time, and estimates what still fits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The next part of a kind is larger than the one before.
_GROWTH = 2.0


class TimeBudget:
    """Estimates from the last part of a kind whether the next one fits.

    Args:
        seconds: for the whole run.
        clock_s: monotonic time.
    """

    def __init__(self, seconds: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._ends_s = clock_s() + seconds
        self._last_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """Seconds left; negative if the budget is exceeded."""
        return self._ends_s - self._clock_s()

    def has_room(self, kind: str, share: float = 1.0) -> bool:
        """Whether one more part of this kind fits.

        Args:
            share: of a whole part.
        """
        return self.left_s > share * _GROWTH * self._last_s.get(kind, 0.0)

    @contextmanager
    def spent_on(self, kind: str) -> Iterator[None]:
        """Measure the time of a part of this kind inside the block."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            self._last_s[kind] = self._clock_s() - began_s
