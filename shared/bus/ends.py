"""Detects logs that have lost their end although the server was not restarted.

An operator may delete a log, or flush the server. Ids then begin anew, below those that were read
or written before: a reader whose cursor is above them gets nothing, for ever.
"""

from collections.abc import Mapping

from shared.bus.api import Bus, EntryId


class LogEnds:
    """Compares the last ids of logs with ids that were read or written.

    The last id is requested only of logs that have not grown since the check before: in others,
    new entries were read behind the cursor. So a check costs nothing while there is traffic.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[str, EntryId] = {}

    async def lost(self, known: Mapping[str, EntryId]) -> str | None:
        """Name of a log whose last id is below an id that was in it; None if there is none.

        Args:
            known: of each log an entry that was read or written.

        Raises:
            BusUnavailable: the server does not answer.
        """
        before, self._seen = self._seen, dict(known)
        for log, entry_id in known.items():
            if before.get(log) == entry_id and await self._bus.last_id(log) < entry_id:
                return log
        return None
