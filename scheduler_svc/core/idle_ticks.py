"""Moments at which the scheduler made no plan: a replay must ask at the same moments."""

from shared.bus.api import EntryId
from shared.messages.plans import Tick


class IdleTicks:
    """Collects the moments since the last plan.

    While there is no request at all, only the first one matters: an idle engine that gets requests
    which it refuses must not collect ticks without end.

    Attributes:
        cursor: last entry of ``requests`` before the last tick or plan.
    """

    def __init__(self, cursor: EntryId) -> None:
        self.cursor = cursor
        self._ticks: list[Tick] = []
        self._was_empty = False  # no request was left at the last tick

    def record(self, now_ms: int, requests: EntryId, outputs: EntryId, is_empty: bool) -> None:
        """Record a moment without a plan.

        Args:
            requests: cursor of the requests log.
            outputs: cursor of the outputs log.
            is_empty: no request has not ended.
        """
        if not (is_empty and self._was_empty):
            self._ticks.append(Tick(now_ms, str(requests), str(outputs)))
            self.cursor = requests
        self._was_empty = is_empty

    def planned(self, requests: EntryId) -> None:
        """Record that a plan was made."""
        self._was_empty = False
        self.cursor = requests

    def take(self) -> list[Tick]:
        """The moments since the last call."""
        taken, self._ticks = self._ticks, []
        return taken
