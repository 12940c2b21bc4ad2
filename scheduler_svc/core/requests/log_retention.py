"""Decides how far the outputs log may be trimmed.

A recovery must find a RequestState with the prompt of every unfinished request; the prompt itself
is in the prompts log, in an entry that is kept as long. Slow readers must find recent entries, up
to a number of entries and a number of bytes. Requests that run for long get a fresh RequestState,
so that the log before it can be trimmed; only then is the prompt written again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain

from scheduler_svc.core.sequences.sequence import SequenceGroup
from shared.bus.api import START, EntryId

# Limits of the states that are written in one step.
_MAX_REFRESHED = 64
_MAX_REFRESHED_BYTES = 256 << 10
_RECENT_ENTRIES = 64  # that a gateway which keeps up may not have read yet
_LIVE_SHARE = 4  # the log may have this many times the size of all states, which must be in it
_STATE_BYTES = 512  # of a state without its tokens


class _Recent:
    """The last entries up to a number of bytes."""

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

    def grow(self, num_bytes: int) -> None:
        """Add to the size of the last entry."""
        if self._sizes:
            entry_id, size = self._sizes.pop()
            self._sizes.append((entry_id, size + num_bytes))
            self.num_bytes += num_bytes


class Retention:
    """Unfinished requests in the order of their latest RequestStates that have the prompt.

    Args:
        num_entries: most entries kept for slow readers.
        num_bytes: limit of their size, unless the states alone are a large part of it.
    """

    def __init__(self, num_entries: int, num_bytes: int) -> None:
        self._num_entries = num_entries
        self._num_bytes = num_bytes
        self._recent, self._half = _Recent(), _Recent()
        self._oldest_first: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._requested: dict[str, SequenceGroup] = {}
        self._prompts_requested: set[str] = set()  # those of ``_requested`` that need the prompt
        self._sizes: dict[str, int] = {}  # of the latest states with prompts
        self._states_bytes = 0

    def read(self, at: EntryId, num_bytes: int) -> None:
        """Count an entry that was read."""
        limit = max(self._num_bytes, _LIVE_SHARE * self._states_bytes)
        self._recent.add(at, num_bytes, limit, self._num_entries + 1)
        self._half.add(at, num_bytes, limit // 2, self._num_entries // 2 + 1)

    def read_prompt(self, num_bytes: int) -> None:
        """Count a prompt to which the last entry refers: it is kept as long."""
        if num_bytes:
            self._recent.grow(num_bytes)
            self._half.grow(num_bytes)

    @property
    def bytes_left(self) -> int:
        """Bytes that are left for entries of earlier epochs."""
        return max(self._num_bytes, _LIVE_SHARE * self._states_bytes) - self._recent.num_bytes

    def needs_states(self, head: EntryId) -> bool:
        """Whether a gateway waits for a RequestState, or an old one prevents trimming."""
        return bool(self._requested) or self.min_id(head) < self._oldest_recent(head)

    def request_state(self, group: SequenceGroup, with_prompt: bool = False) -> None:
        """Request a fresh RequestState for a gateway.

        Args:
            with_prompt: whether the gateway has only the request's id.
        """
        self._requested[group.request_id] = group
        if with_prompt:
            self._prompts_requested.add(group.request_id)

    def state_written(self, group: SequenceGroup, at: EntryId, with_prompt: bool = True) -> None:
        """Store the entry that has the group's latest RequestState."""
        if not with_prompt:
            if group.request_id not in self._prompts_requested:
                self._requested.pop(group.request_id, None)
            return
        self._forget(group)
        self._oldest_first[group.request_id] = group
        self._clear_requested(group)
        group.state_id = at
        size = self._sizes[group.request_id] = _state_bytes(group)
        self._states_bytes += size

    def ended(self, group: SequenceGroup) -> None:
        """Forget a request: the log need not have it any more."""
        self._forget(group)
        self._clear_requested(group)

    def min_id(self, head: EntryId) -> EntryId:
        """Entries below may be trimmed when ``head`` is the last entry."""
        recent = self._oldest_recent(head)
        oldest = next(iter(self._oldest_first.values()), None)
        if oldest is None or oldest.state_id is None:
            return recent
        return min(recent, oldest.state_id)

    def needed_id(self, head: EntryId) -> EntryId:
        """Only slow readers need entries below; recovery does not."""
        recent = EntryId(head.epoch, max(head.seq - _RECENT_ENTRIES, 0))
        oldest = next(iter(self._oldest_first.values()), None)
        return recent if oldest is None else min(recent, oldest.state_id or START)

    def overdue(self, head: EntryId, is_pressed: bool = False) -> list[SequenceGroup]:
        """Groups whose RequestState a gateway waits for, or which prevents trimming, or soon will.

        Args:
            is_pressed: whether the log should become as short as it can.
        """
        limit = self._limit(head, is_pressed)
        due: list[SequenceGroup] = []
        num_bytes = 0
        for group in chain(self._requested.values(), self._old(limit)):
            if len(due) >= _MAX_REFRESHED or num_bytes >= _MAX_REFRESHED_BYTES:
                break
            due.append(group)
            num_bytes += _state_bytes(group)
        return due

    def needs_prompt(self, group: SequenceGroup, head: EntryId, is_pressed: bool = False) -> bool:
        """Whether the group's next RequestState must have the prompt."""
        if group.request_id in self._prompts_requested or group.state_id is None:
            return True
        return group.state_id < self._limit(head, is_pressed)

    def _limit(self, head: EntryId, is_pressed: bool) -> EntryId:
        """States below prevent trimming, or soon will."""
        num_entries = self._num_entries // 2
        if is_pressed:
            num_entries = min(num_entries, _RECENT_ENTRIES)
        return max(self._half.first, EntryId(head.epoch, head.seq - num_entries))

    def _old(self, limit: EntryId) -> Iterator[SequenceGroup]:
        for group in self._oldest_first.values():
            if (group.state_id or START) >= limit:
                break
            if group.request_id not in self._requested:
                yield group

    def _oldest_recent(self, head: EntryId) -> EntryId:
        """Entries below are older than those kept for slow readers."""
        if head.seq < self._num_entries:
            return self._recent.first
        return max(self._recent.first, EntryId(head.epoch, head.seq - self._num_entries))

    def _clear_requested(self, group: SequenceGroup) -> None:
        self._requested.pop(group.request_id, None)
        self._prompts_requested.discard(group.request_id)

    def _forget(self, group: SequenceGroup) -> None:
        self._oldest_first.pop(group.request_id, None)
        self._states_bytes -= self._sizes.pop(group.request_id, 0)


def _state_bytes(group: SequenceGroup) -> int:
    """Estimated size of the group's RequestState."""
    num_tokens = len(group.submit.prompt) + sum(len(found.output) for found in group.sequences)
    return _STATE_BYTES + 4 * (num_tokens + sum(len(done.output) for done in group.ended.values()))
