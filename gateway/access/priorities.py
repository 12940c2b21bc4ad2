"""Ranges of priorities that requests may have; lower priorities are served first."""

import re
from dataclasses import dataclass

_RANGE = re.compile(r"(-?\d{1,10})\.\.(-?\d{1,10})")
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1
_DEFAULT = 0


@dataclass(frozen=True, slots=True)
class PriorityRange:
    """Priorities from ``low`` to ``high``, both included."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> "PriorityRange":
        """Parses a range such as ``-10..10``, or ``none`` for the default priority alone.

        Raises:
            ValueError: the text is no range.
        """
        if text == "none":
            return ONLY_DEFAULT
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ValueError("expected LOW..HIGH such as -10..10, or none")
        low, high = int(found[1]), int(found[2])
        if not _LOWEST <= low <= high <= _HIGHEST:
            raise ValueError(f"expected {_LOWEST} <= LOW <= HIGH <= {_HIGHEST}")
        return PriorityRange(low, high)

    def __contains__(self, priority: int) -> bool:
        return self.low <= priority <= self.high

    def __str__(self) -> str:
        return f"{self.low} only" if self.low == self.high else f"{self.low} to {self.high}"

    @property
    def default(self) -> int:
        """Priority of requests that give none: the one in the range that is nearest to 0."""
        return min(max(_DEFAULT, self.low), self.high)


ONLY_DEFAULT = PriorityRange(_DEFAULT, _DEFAULT)
ANY_PRIORITY = PriorityRange(_LOWEST, _HIGHEST)
