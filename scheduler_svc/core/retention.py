"""How far the outputs log may be trimmed.

Whoever folds the log must find a RequestState of every unfinished request, and slow readers must
find recent entries. Requests that have lived long get a fresh RequestState, so that the log in
front of them can go.
"""

from collections import OrderedDict

from scheduler_svc.core.sequence import SequenceGroup
from shared.bus.api import START, EntryId

_MAX_REFRESHED = 16  # a step should not pay for many at once


class Retention:
    """Unfinished requests in the order of their latest RequestState."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._oldest_first: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._owed: dict[str, SequenceGroup] = {}

    @property
    def owes(self) -> bool:
        """Somebody waits for a RequestState."""
        return bool(self._owed)

    def restate(self, group: SequenceGroup) -> None:
        """Somebody wants to know how a request stands."""
        self._owed[group.request_id] = group

    def stated(self, group: SequenceGroup, at: EntryId) -> None:
        """A RequestState of the group was read at this place of the log."""
        self._oldest_first.pop(group.request_id, None)
        self._oldest_first[group.request_id] = group
        self._owed.pop(group.request_id, None)
        group.state_id = at

    def ended(self, group: SequenceGroup) -> None:
        """The log need not hold the request any more."""
        self._oldest_first.pop(group.request_id, None)
        self._owed.pop(group.request_id, None)

    def min_id(self, head: EntryId) -> EntryId:
        """Entries below may be trimmed when ``head`` is the last entry."""
        if head.seq < self._num_entries:
            return START
        enough = EntryId(head.epoch, head.seq - self._num_entries)
        oldest = next(iter(self._oldest_first.values()), None)
        if oldest is None or oldest.state_id is None:
            return enough
        return min(enough, oldest.state_id)

    def overdue(self, head: EntryId) -> list[SequenceGroup]:
        """Groups whose RequestState somebody waits for, holds the log back, or soon will."""
        due = list(self._owed.values())[:_MAX_REFRESHED]
        limit = EntryId(head.epoch, head.seq - self._num_entries // 2)
        for group in self._oldest_first.values():
            if len(due) >= _MAX_REFRESHED or (group.state_id or START) >= limit:
                break
            if group.request_id not in self._owed:
                due.append(group)
        return due
