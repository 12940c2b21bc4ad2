"""Reads the plans log: the next read is under way before the worker waits for its entry."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from shared.bus.api import Bus, EntryId
from shared.codec import Message, decode
from shared.errors import DecodeError
from shared.tasks import cancel_until_done

_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One decoded entry.

    Attributes:
        messages: up to the first that cannot be decoded.
        fault: why that one cannot be decoded; None if all were.
    """

    id: EntryId
    messages: tuple[Message, ...]
    fault: str | None


class PlanReader:
    """Reads and decodes entries while the worker computes.

    Args:
        bus: with the log.
        log: key of the plans log.
        after: entries up to this one are skipped.
        block_ms: how long one read waits for an entry.

    Attributes:
        cursor: last entry that was read or skipped.
    """

    def __init__(self, bus: Bus, log: str, after: EntryId, block_ms: int) -> None:
        self._bus = bus
        self._log = log
        self.cursor = after
        self._block_ms = block_ms
        self._entries: deque[PlanEntry] = deque()
        self._reading = asyncio.create_task(self._read())

    def has_next(self) -> bool:
        """Whether ``next`` returns an entry without waiting.

        Raises:
            BusUnavailable: the log could not be read.
        """
        if not self._entries and self._reading.done():
            self._collect()
        return bool(self._entries)

    async def next(self) -> PlanEntry | None:
        """The next entry; None if none came within ``block_ms``.

        Raises:
            BusUnavailable: the log could not be read.
        """
        if not self._entries:
            await asyncio.wait([self._reading])
            self._collect()
        return self._entries.popleft() if self._entries else None

    async def next_or(self, other: asyncio.Future[Any]) -> None:
        """Wait for an entry or for ``other``, whichever comes first.

        Raises:
            BusUnavailable: the log could not be read.
        """
        while not self.has_next() and not other.done():
            either: list[asyncio.Future[Any]] = [self._reading, other]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def peek(self) -> Message | None:
        """The first message of the next entry, which stays the next; waits for an entry.

        Returns:
            None if the message cannot be decoded.

        Raises:
            BusUnavailable: the log could not be read.
        """
        while not self._entries:
            await asyncio.wait([self._reading])
            self._collect()
        return next(iter(self._entries[0].messages), None)

    async def close(self) -> None:
        """Stop reading."""
        await cancel_until_done(self._reading)
        if not self._reading.cancelled():
            self._reading.exception()  # retrieved, so that asyncio does not log it

    def _collect(self) -> None:
        self._entries += self._reading.result()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> list[PlanEntry]:
        cursors = {self._log: self.cursor}
        found = await self._bus.read(cursors, self._block_ms, _MAX_ENTRIES)
        entries = [_decoded(entry.id, entry.messages) for entry in found.get(self._log, ())]
        if entries:
            self.cursor = entries[-1].id
        return entries


def _decoded(entry_id: EntryId, data: tuple[bytes, ...]) -> PlanEntry:
    messages: list[Message] = []
    try:
        for item in data:
            messages.append(decode(item))
    except DecodeError as error:
        return PlanEntry(entry_id, tuple(messages), str(error))
    return PlanEntry(entry_id, tuple(messages), None)
