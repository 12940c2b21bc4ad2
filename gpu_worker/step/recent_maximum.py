"""The maximum of recent values."""

from collections.abc import Callable


class RecentMaximum:
    """The maximum of at least the last window, and of at most the last two.

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
        """Add a value that was measured now."""
        self._advance_window()
        self._now = max(self._now, value)

    @property
    def value(self) -> float:
        """The recent maximum; 0 if there are no recent values."""
        self._advance_window()
        return max(self._now, self._before)

    def _advance_window(self) -> None:
        """Begin the next window if the present one is over."""
        past_s = self._clock_s() - self._began_s
        if past_s < self._window_s:
            return
        self._before = self._now if past_s < 2 * self._window_s else 0.0
        self._now = 0.0
        self._began_s += past_s
