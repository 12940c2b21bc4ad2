"""Groups that wait for their first admission, by rank."""

from heapq import heapify, heappop, heappush

from scheduler_svc.core.sequences.sequence import WAITING, SequenceGroup

_CLEAN_AT = 1_024  # entries; beyond that, groups that do not wait any more are dropped

_Entry = tuple[tuple[int, int], SequenceGroup]  # with its rank


class WaitingQueue:
    """Waiting groups, each filed by the number of slots that it needs.

    Neither many groups of several sequences nor many of one make it slower to find the first by
    rank that fits.
    """

    def __init__(self) -> None:
        self._by_slots: dict[int, list[_Entry]] = {}  # heaps; some groups do not wait any more
        self._num_entries = 0
        self._clean_at = _CLEAN_AT

    def __len__(self) -> int:
        """Number of entries; some of their groups may have ended."""
        return self._num_entries

    def add(self, group: SequenceGroup) -> None:
        """Add a group that is new here, or needs another number of slots than before."""
        if self._num_entries >= self._clean_at:
            self._drop_ended()
        heappush(self._by_slots.setdefault(group.num_slots, []), (group.rank, group))
        self._num_entries += 1

    def first(self, max_slots: int | None = None) -> SequenceGroup | None:
        """The first group by rank, None if there is none.

        Args:
            max_slots: only of the groups that need no more slots than this.
        """
        if not self._by_slots:
            return None  # as in most steps
        first: SequenceGroup | None = None
        for num_slots in list(self._by_slots):
            if max_slots is None or num_slots <= max_slots:
                found = self._head(num_slots)
                if found is not None and (first is None or found.rank < first.rank):
                    first = found
        return first

    def _head(self, num_slots: int) -> SequenceGroup | None:
        """The first of the groups that were filed under this number of slots and still wait."""
        heap = self._by_slots[num_slots]
        while heap:
            group = heap[0][1]
            if group.state is WAITING and group.num_slots == num_slots:
                return group
            heappop(heap)
            self._num_entries -= 1
        del self._by_slots[num_slots]
        return None

    def _drop_ended(self) -> None:
        for num_slots, heap in list(self._by_slots.items()):
            heap[:] = [entry for entry in heap if entry[1].state is WAITING]
            heapify(heap)
            if not heap:
                del self._by_slots[num_slots]
        self._num_entries = sum(map(len, self._by_slots.values()))
        self._clean_at = max(_CLEAN_AT, 2 * self._num_entries)
