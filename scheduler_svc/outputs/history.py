"""What earlier epochs left in the outputs log, and how much of it is to stay."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from shared.bus.api import EntryId


class History:
    """The entries of earlier epochs with their sizes.

    Plans name what the worker may trim, from the entries of their own epoch, and the scheduler's
    own appends trim as much. Where no epoch lives long enough for that, the log would grow for as
    long as something keeps dying; so those appends also trim what is too old of earlier epochs.
    They may do so as soon as the requests that were recovered have been stated again, which they
    are before anything else is appended.

    Args:
        entries: oldest first, with their sizes in bytes.
    """

    def __init__(self, entries: Sequence[tuple[EntryId, int]]) -> None:
        self._newest_first = [entry_id for entry_id, _ in reversed(entries)]
        # [i]: bytes of the i + 1 newest
        self._num_bytes = list(accumulate(size for _, size in reversed(entries)))

    def trim_below(self, head: EntryId, num_entries: int, bytes_left: int) -> EntryId | None:
        """The oldest entry to keep, so that so many are left up to ``head``.

        Args:
            bytes_left: that those of earlier epochs may have together.

        Returns:
            None if all may stay, or this epoch's own entries are more than enough.
        """
        num_left = num_entries - (head.seq + 1)
        if num_left < 0 or bytes_left < 0:
            return None
        # As many as do not have more bytes than that.
        fit = bisect_left(self._num_bytes, bytes_left + 1)
        num_left = min(num_left, fit)
        if num_left >= len(self._newest_first):
            return None
        if num_left == 0:
            return _next(self._newest_first[0]) if self._newest_first else None
        return self._newest_first[num_left - 1]


def _next(entry_id: EntryId) -> EntryId:
    return EntryId(entry_id.epoch, entry_id.seq + 1)
