"""What earlier epochs left in the outputs log, and how much of it is to stay."""

from collections.abc import Sequence

from shared.bus.api import EntryId


class History:
    """The last entry of each earlier epoch, oldest first; ids within an epoch have no gaps.

    Plans name what the worker may trim, from the entries of their own epoch, and the scheduler's
    own appends trim as much. Where no epoch lives long enough for that, the log would grow for as
    long as something keeps dying; so those appends also trim what is too old of earlier epochs.
    They may do so as soon as the requests that were recovered have been stated again, which they
    are before anything else is appended.
    """

    def __init__(self, last_ids: Sequence[EntryId]) -> None:
        self._last_ids = tuple(last_ids)

    def trim_below(self, head: EntryId, num_entries: int) -> EntryId | None:
        """Entries below this are older than the last ``num_entries`` up to ``head``.

        None if there are no such entries of earlier epochs, or too many to know.
        """
        num_left = num_entries - (head.seq + 1)
        if num_left < 0:
            return None  # this epoch's own entries are more than enough
        for last in reversed(self._last_ids):
            if last.seq + 1 >= num_left:
                return EntryId(last.epoch, last.seq + 1 - num_left)
            num_left -= last.seq + 1
        return None
