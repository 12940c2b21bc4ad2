"""Groups that wait for their first admission, and which of them is next."""

from heapq import heapify, heappop, heappush

from scheduler_svc.core.sequences.sequence import WAITING, SequenceGroup

_CLEAN_AT = 1_024  # groups; beyond, those that wait no more are dropped now and then

_Entry = tuple[tuple[int, int], SequenceGroup]  # with its rank


class WaitingQueue:
    """The first group by rank is next, but for one exception: bounded backfill.

    A group of several sequences needs as many seats at once. While the first does not have them,
    later groups of the same priority may pass it, in their order, for so many steps. From then on
    no group may: seats that become free are kept for it, and since every sequence has a longest
    length, it gets them. The next group that needs more seats than there are begins anew, so others
    have their steps between any two of them.

    Groups are filed by their number of seats, so neither many wide ones nor many narrow ones make
    the choice take longer.

    Args:
        max_passing_steps: how long a group can be passed; 0: not at all.
    """

    def __init__(self, max_passing_steps: int) -> None:
        self._max_passing_steps = max_passing_steps
        self._by_seats: dict[int, list[_Entry]] = {}  # heaps; may hold groups that wait no more
        self._num_entries = 0
        self._clean_at = _CLEAN_AT

    def __len__(self) -> int:
        """Groups that it holds; some may have ended."""
        return self._num_entries

    def add(self, group: SequenceGroup) -> None:
        """A group waits from now on, or needs another number of seats than before."""
        if self._num_entries >= self._clean_at:
            self._drop_the_gone()
        heappush(self._by_seats.setdefault(group.num_seats, []), (group.rank, group))
        self._num_entries += 1

    def next(self, num_free_seats: int, step: int) -> SequenceGroup | None:
        """The group to admit next, None if none waits or the next lacks seats.

        Args:
            num_free_seats: sequences that may be admitted.
            step: that is being planned.
        """
        if not self._by_seats:
            return None  # as in most steps
        first = self._first()
        if first is None or first.num_seats <= num_free_seats:
            return first
        first.passed_since = first.passed_since or step
        if step - first.passed_since >= self._max_passing_steps:
            return None
        other = self._first(num_free_seats)
        same_priority = other is not None and other.submit.priority == first.submit.priority
        return other if same_priority else None

    def _first(self, max_seats: int | None = None) -> SequenceGroup | None:
        """The first group by rank, of those that need no more seats than that."""
        first: SequenceGroup | None = None
        for num_seats in list(self._by_seats):
            if max_seats is None or num_seats <= max_seats:
                found = self._head(num_seats)
                if found is not None and (first is None or found.rank < first.rank):
                    first = found
        return first

    def _head(self, num_seats: int) -> SequenceGroup | None:
        """The first of those that were filed under so many seats, and still belong there."""
        heap = self._by_seats[num_seats]
        while heap:
            group = heap[0][1]
            if group.state is WAITING and group.num_seats == num_seats:
                return group
            heappop(heap)
            self._num_entries -= 1
        del self._by_seats[num_seats]
        return None

    def _drop_the_gone(self) -> None:
        for num_seats, heap in list(self._by_seats.items()):
            heap[:] = [entry for entry in heap if entry[1].state is WAITING]
            heapify(heap)
            if not heap:
                del self._by_seats[num_seats]
        self._num_entries = sum(map(len, self._by_seats.values()))
        self._clean_at = max(_CLEAN_AT, 2 * self._num_entries)
