"""The plans log as a worker reads it: the next entry is asked for before anybody waits for it."""

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
    """One entry.

    Attributes:
        messages: up to the first that cannot be read.
        fault: why that one cannot.
    """

    id: EntryId
    messages: tuple[Message, ...]
    fault: str | None


class PlanReader:
    """Reads and decodes entries while the worker computes.

    Args:
        log: of the plans.
        after: entries up to this one are of no interest.
        block_ms: how long one read waits for something to read.

    Attributes:
        cursor: last entry that was read, or is of no interest.
    """

    def __init__(self, bus: Bus, log: str, after: EntryId, block_ms: int) -> None:
        self._bus = bus
        self._log = log
        self.cursor = after
        self._block_ms = block_ms
        self._entries: deque[PlanEntry] = deque()
        self._reading = asyncio.create_task(self._read())

    def has_next(self) -> bool:
        """Whether ``next`` would not wait.

        Raises:
            BusUnavailable: the log could not be read.
        """
        if not self._entries and self._reading.done():
            self._collect()
        return bool(self._entries)

    async def next(self) -> PlanEntry | None:
        """The next entry; None if there is still none after some time.

        Raises:
            BusUnavailable: the log could not be read.
        """
        if not self._entries:
            await asyncio.wait([self._reading])
            self._collect()
        return self._entries.popleft() if self._entries else None

    async def next_or(self, other: asyncio.Future[Any]) -> None:
        """Return as soon as there is an entry, or the other is done.

        Raises:
            BusUnavailable: the log could not be read.
        """
        while not self.has_next() and not other.done():
            either: list[asyncio.Future[Any]] = [self._reading, other]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def peek(self) -> Message | None:
        """What the next entry begins with, as soon as there is one; it stays the next.

        Returns:
            None if that cannot be read.

        Raises:
            BusUnavailable: the log could not be read.
        """
        while not self._entries:
            await asyncio.wait([self._reading])
            self._collect()
        return next(iter(self._entries[0].messages), None)

    async def close(self) -> None:
        """Read no more."""
        await cancel_until_done(self._reading)
        if not self._reading.cancelled():
            self._reading.exception()  # nobody is left to whom it matters

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
