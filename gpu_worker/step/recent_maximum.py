"""The largest of the values that came lately."""

from collections.abc import Callable


class RecentMaximum:
    """Forgets what is older than two windows, and nothing that is younger than one.

    Args:
        window_s: length of a window.
        clock_s: monotonic time.
    """

    def __init__(self, window_s: float, clock_s: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._now = self._before = 0.0  # largest of this window, and of the one before

    def add(self, value: float) -> None:
        """A value came now."""
        self._turn()
        self._now = max(self._now, value)

    @property
    def value(self) -> float:
        """The largest value that is remembered; 0 if there is none."""
        self._turn()
        return max(self._now, self._before)

    def _turn(self) -> None:
        """Begin the next window if it is time."""
        past_s = self._clock_s() - self._began_s
        if past_s < self._window_s:
            return
        self._before = self._now if past_s < 2 * self._window_s else 0.0
        self._now = 0.0
        self._began_s += past_s
