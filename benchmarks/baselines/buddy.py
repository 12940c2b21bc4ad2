"""A buddy allocator: contiguous runs of slots whose lengths and alignments are powers of two."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Slots [start, start + size); ``size`` is a power of two and divides ``start``."""

    start: int
    size: int


class BuddyAllocator:
    """Allocates the lowest run that fits, and joins free halves again.

    A pool whose size is no power of two begins as the largest aligned runs that it consists of; the
    rest behind the largest run can hold no longer run than its own pieces.

    Args:
        num_slots: size of the pool.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a pool of {num_slots} slots")
        self.num_slots = num_slots
        self.num_free = num_slots
        self.largest = 1 << (num_slots.bit_length() - 1)  # longest run that can be allocated
        self._free: dict[int, set[int]] = {}  # starts, by size
        start, size = 0, self.largest
        while size:
            self._free[size] = set()
            if start + size <= num_slots:
                self._free[size].add(start)
                start += size
            size //= 2
        self._used: dict[int, int] = {}  # size, by start

    def allocate(self, num_slots: int) -> Run | None:
        """A run of at least so many slots, or None if no free piece is that long."""
        size = size_of_run(num_slots)
        found = size
        while found <= self.largest and not self._free[found]:
            found *= 2
        if found > self.largest:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        self._used[start] = size
        self.num_free -= size
        return Run(start, size)

    def free(self, run: Run) -> None:
        """Free a run.

        Raises:
            ValueError: it is not allocated.
        """
        if self._used.get(run.start) != run.size:
            raise ValueError(f"{run} is not in use")
        del self._used[run.start]
        self.num_free += run.size
        start, size = run.start, run.size
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free[size].add(start)

    def free_runs(self) -> list[Run]:
        """The free runs, as long as possible, in order."""
        found = [Run(start, size) for size, starts in self._free.items() for start in starts]
        return sorted(found, key=lambda run: run.start)


def size_of_run(num_slots: int) -> int:
    """The smallest power of two that holds ``num_slots``."""
    return 1 << (max(num_slots, 1) - 1).bit_length()
