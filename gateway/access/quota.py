"""A quantity that callers share."""

from collections import Counter


class Quota:
    """So much of something, all together, and of this so much for one caller.

    Args:
        total: what all callers may hold.
        most: what one caller may hold while there are others.
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
        """So much more is more than a caller may hold."""
        return self._held[caller] + amount > self.most

    def is_exhausted(self, amount: int) -> bool:
        """So much more is more than there is."""
        return self._held_by_all + amount > self.total

    def take(self, caller: str, amount: int) -> None:
        """A caller holds so much more."""
        self._held_by_all += amount
        self._held[caller] += amount

    def release(self, caller: str, amount: int) -> None:
        """A caller holds so much less."""
        self._held_by_all -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]
