"""Appends messages in the background until the bus takes them: Attach, Stop, Abort, Pin."""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from gateway.engine.backoff import Backoff
from shared.bus.api import Append, Bus, EntryId
from shared.codec import encode
from shared.errors import BusUnavailable
from shared.logs import EventLog
from shared.messages.requests import Abort, Attach, Pin, Stop

_MAX_MESSAGES = 64  # of one entry, which is read at once,
_MAX_BYTES = 1 << 20  # unless a message alone is larger

_log = EventLog("gateway.engine.outbox")


class Outbox:
    """Appends to one requests log, in order, and tries again while the bus is away.

    Only these messages are safe to repeat: a second copy has no further effect.

    Args:
        trim_below: up to where the log may be trimmed now, None if that is not known.
    """

    def __init__(self, bus: Bus, log: str, trim_below: Callable[[], EntryId | None]) -> None:
        self._bus = bus
        self._requests_log = log
        self._trim_below = trim_below
        self._waiting: deque[Attach | Stop | Abort | Pin] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def send(self, message: Attach | Stop | Abort | Pin) -> None:
        """Append as soon as possible."""
        self._waiting.append(message)
        self._idle.clear()
        self._work.set()

    @property
    def is_behind(self) -> bool:
        """Something sent earlier has not been appended yet."""
        return bool(self._waiting)

    async def flushed(self) -> None:
        """Return when everything sent so far has been appended."""
        await self._idle.wait()

    async def run(self) -> None:
        """Append until cancelled."""
        backoff = Backoff()
        while True:
            await self._work.wait()
            messages = self._next()
            append = Append(self._requests_log, messages, trim_below=self._trim_below())
            try:
                await self._bus.append(append)
            except BusUnavailable as error:
                _log.warning("cannot append", messages=len(self._waiting), error=error)
                await backoff.wait()
                continue
            backoff.reset()
            for _ in messages:
                self._waiting.popleft()
            if not self._waiting:
                self._work.clear()
                self._idle.set()

    def _next(self) -> list[bytes]:
        """The first messages that wait, encoded, as many as one entry may have."""
        messages: list[bytes] = []
        num_bytes = 0
        for message in islice(self._waiting, _MAX_MESSAGES):
            data = encode(message)
            num_bytes += len(data)
            if messages and num_bytes > _MAX_BYTES:
                break
            messages.append(data)
        return messages
