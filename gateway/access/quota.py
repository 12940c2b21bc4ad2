"""Limits a quantity that callers share."""

from collections import Counter


class Quota:
    """A limit for all callers together, and one for each.

    Args:
        total: the most that all callers may hold.
        most: the most that one caller may hold while there are others.
    """

    def __init__(self, total: int, most: int) -> None:
        self.total = total
        self.most = min(most, total)
        self._held: Counter[str] = Counter()  # by caller
        self._held_by_all = 0

    @property
    def held(self) -> int:
        """What all callers hold together."""
        return self._held_by_all

    def is_exhausted_for(self, caller: str, amount: int) -> bool:
        """Whether ``amount`` more would exceed the limit of one caller."""
        return self._held[caller] + amount > self.most

    def is_exhausted(self, amount: int) -> bool:
        """Whether ``amount`` more would exceed the limit of all callers."""
        return self._held_by_all + amount > self.total

    def take(self, caller: str, amount: int) -> None:
        """Count ``amount`` more for a caller."""
        self._held_by_all += amount
        self._held[caller] += amount

    def release(self, caller: str, amount: int) -> None:
        """Count ``amount`` less for a caller."""
        self._held_by_all -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]
