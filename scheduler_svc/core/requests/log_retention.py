"""How far the outputs log may be trimmed.

Whoever folds the log must find a RequestState with the prompt of every unfinished request, and
slow readers must find recent entries: so many of them, as long as they have no more than so many
bytes. Requests that have lived long get a fresh RequestState, so that the log in front of them can
go; only then is a prompt written again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain

from scheduler_svc.core.sequences.sequence import SequenceGroup
from shared.bus.api import START, EntryId

# A step should not pay for many states at once.
_MAX_REFRESHED = 64
_MAX_REFRESHED_BYTES = 256 << 10
_RECENT_ENTRIES = 64  # that a gateway which keeps up may not have read yet
_LIVE_SHARE = 4  # as much as all states together is never too much: they would only be rewritten
_STATE_BYTES = 512  # of a state, beside its tokens


class _Recent:
    """The last entries that have no more than so many bytes."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[EntryId, int]] = deque()
        self.num_bytes = 0
        self.first = START  # entries below are older

    def add(self, entry_id: EntryId, num_bytes: int, limit: int, max_entries: int) -> None:
        self._sizes.append((entry_id, num_bytes))
        self.num_bytes += num_bytes
        while self.num_bytes > limit or len(self._sizes) > max_entries:
            self.num_bytes -= self._sizes.popleft()[1]
            self.first = self._sizes[0][0] if self._sizes else entry_id


class Retention:
    """Unfinished requests in the order of their latest RequestStates that have the prompt.

    Args:
        num_entries: that slow readers find at most.
        num_bytes: that these have at most, unless the states alone are a large part of that.
    """

    def __init__(self, num_entries: int, num_bytes: int) -> None:
        self._num_entries = num_entries
        self._num_bytes = num_bytes
        self._recent, self._half = _Recent(), _Recent()
        self._oldest_first: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._owed: dict[str, SequenceGroup] = {}
        self._prompts_owed: set[str] = set()  # by request; those of ``_owed`` that must have it
        self._sizes: dict[str, int] = {}  # of the latest states with prompts
        self._states_bytes = 0

    def read(self, at: EntryId, num_bytes: int) -> None:
        """An entry of this size was read."""
        limit = max(self._num_bytes, _LIVE_SHARE * self._states_bytes)
        self._recent.add(at, num_bytes, limit, self._num_entries + 1)
        self._half.add(at, num_bytes, limit // 2, self._num_entries // 2 + 1)

    @property
    def bytes_left(self) -> int:
        """That the entries of epochs before may have."""
        return max(self._num_bytes, _LIVE_SHARE * self._states_bytes) - self._recent.num_bytes

    def owes(self, head: EntryId) -> bool:
        """A gateway waits for a RequestState, or an old one holds back what should be trimmed."""
        return bool(self._owed) or self.min_id(head) < self._enough(head)

    def restate(self, group: SequenceGroup, with_prompt: bool = False) -> None:
        """A gateway asks how a request stands.

        Args:
            with_prompt: it has only the request's id.
        """
        self._owed[group.request_id] = group
        if with_prompt:
            self._prompts_owed.add(group.request_id)

    def stated(self, group: SequenceGroup, at: EntryId, with_prompt: bool = True) -> None:
        """A RequestState of the group was read at this place of the log."""
        if not with_prompt:
            if group.request_id not in self._prompts_owed:
                self._owed.pop(group.request_id, None)
            return
        self._forget(group)
        self._oldest_first[group.request_id] = group
        self._pay(group)
        group.state_id = at
        size = self._sizes[group.request_id] = _state_bytes(group)
        self._states_bytes += size

    def ended(self, group: SequenceGroup) -> None:
        """The log need not hold the request any more."""
        self._forget(group)
        self._pay(group)

    def min_id(self, head: EntryId) -> EntryId:
        """Entries below may be trimmed when ``head`` is the last entry."""
        enough = self._enough(head)
        oldest = next(iter(self._oldest_first.values()), None)
        if oldest is None or oldest.state_id is None:
            return enough
        return min(enough, oldest.state_id)

    def needed_id(self, head: EntryId) -> EntryId:
        """Entries below are needed by no recovery, only by readers that are slow."""
        recent = EntryId(head.epoch, max(head.seq - _RECENT_ENTRIES, 0))
        oldest = next(iter(self._oldest_first.values()), None)
        return recent if oldest is None else min(recent, oldest.state_id or START)

    def overdue(self, head: EntryId, is_pressed: bool = False) -> list[SequenceGroup]:
        """Groups whose RequestState somebody waits for, holds the log back, or soon will.

        Args:
            is_pressed: the log should become as short as it can.
        """
        limit = self._limit(head, is_pressed)
        due: list[SequenceGroup] = []
        num_bytes = 0
        for group in chain(self._owed.values(), self._old(limit)):
            if len(due) >= _MAX_REFRESHED or num_bytes >= _MAX_REFRESHED_BYTES:
                break
            due.append(group)
            num_bytes += _state_bytes(group)
        return due

    def needs_prompt(self, group: SequenceGroup, head: EntryId, is_pressed: bool = False) -> bool:
        """The group's next RequestState must have the prompt."""
        if group.request_id in self._prompts_owed or group.state_id is None:
            return True
        return group.state_id < self._limit(head, is_pressed)

    def _limit(self, head: EntryId, is_pressed: bool) -> EntryId:
        """States below hold the log back, or soon will."""
        num_entries = self._num_entries // 2
        if is_pressed:
            num_entries = min(num_entries, _RECENT_ENTRIES)
        return max(self._half.first, EntryId(head.epoch, head.seq - num_entries))

    def _old(self, limit: EntryId) -> Iterator[SequenceGroup]:
        for group in self._oldest_first.values():
            if (group.state_id or START) >= limit:
                break
            if group.request_id not in self._owed:
                yield group

    def _enough(self, head: EntryId) -> EntryId:
        """Below this the log is longer than slow readers may expect."""
        if head.seq < self._num_entries:
            return self._recent.first
        return max(self._recent.first, EntryId(head.epoch, head.seq - self._num_entries))

    def _pay(self, group: SequenceGroup) -> None:
        self._owed.pop(group.request_id, None)
        self._prompts_owed.discard(group.request_id)

    def _forget(self, group: SequenceGroup) -> None:
        self._oldest_first.pop(group.request_id, None)
        self._states_bytes -= self._sizes.pop(group.request_id, 0)


def _state_bytes(group: SequenceGroup) -> int:
    """About what the group's RequestState takes: mostly the prompt."""
    num_tokens = len(group.submit.prompt) + sum(len(found.output) for found in group.sequences)
    return _STATE_BYTES + 4 * (num_tokens + sum(len(done.output) for done in group.ended.values()))
