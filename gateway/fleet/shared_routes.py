"""Shares between gateways which engine each prompt was sent to, by a log in the directory.

A gateway that knew its own choices alone would send the second turn of a conversation, which comes
through it for the first time, to any engine. The log is a hint: what is lost of it costs a
computation of a prefix, and no request waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from uuid import uuid4

from gateway.engine.backoff import Backoff
from shared.bus.api import START, Append, Bus, Entry, EntryId
from shared.bus.ends import LogEnds
from shared.bus.keys import routes
from shared.codec import decode_as, encode
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.routes import Routed, pack_hashes
from shared.tasks import cancel_until_done, run_together

MAX_LOG_BYTES = 1 << 20  # about the prefixes that an index holds
_MAX_WAITING = 1_024  # messages, while the directory does not answer
_MAX_MESSAGES = 64  # of one entry, which is applied at once
_MAX_ENTRIES = 64
_BLOCK_MS = 1_000
_KEPT_MS = 3_600_000
_RENEW_S = 60.0

_log = EventLog("gateway.fleet.shared_routes")


class SharedRoutes:
    """Appends this gateway's choices in the background, and reads those of others.

    Args:
        bus: the Redis of the directory.
        model_name: of the engines; each model has a log of its own.
    """

    def __init__(self, bus: Bus, model_name: str) -> None:
        self._bus = bus
        self._key = routes(model_name)
        self._name = uuid4().hex
        self._waiting: deque[Routed] = deque(maxlen=_MAX_WAITING)
        self._work = asyncio.Event()
        self._cursor = START
        self._ends = LogEnds(bus)
        self._kept: deque[tuple[EntryId, int]] = deque()  # entries of the log, and their bytes
        self._kept_bytes = 0
        self._renew_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, take: Callable[[Routed], None]) -> None:
        """Begin to share, unless that was begun before.

        Args:
            take: gets the choices of other gateways, beginning with the earlier ones in the log.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._run(take), name="shared routes")
        elif self._task.done():
            self._task.result()  # it failed, and with it the gateway

    async def end(self) -> None:
        """Stop sharing."""
        if self._task is not None:
            await cancel_until_done(self._task)

    def send(self, engine: str, hashes: list[int], num_new_tokens: int) -> None:
        """Share that a prompt was sent to an engine; the oldest are dropped if too many wait."""
        if hashes:
            self._waiting.append(Routed(self._name, engine, pack_hashes(hashes), num_new_tokens))
            self._work.set()

    async def _run(self, take: Callable[[Routed], None]) -> None:
        await run_together(self._append(), self._read(take))

    async def _append(self) -> None:
        backoff = Backoff()
        while True:
            await self._work.wait()
            count = min(len(self._waiting), _MAX_MESSAGES)
            messages = [encode(self._waiting.popleft()) for _ in range(count)]
            if not self._waiting:
                self._work.clear()
            trim_below = self._kept[0][0] if self._kept else None
            try:
                await self._bus.append(Append(self._key, messages, trim_below=trim_below))
                await self._renew()
            except BusUnavailable as error:
                _log.warning("routes not shared", routes=count, error=error)
                await backoff.wait()
                continue
            backoff.reset()

    async def _renew(self) -> None:
        """Let the log expire some time after the last gateway that serves the model."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._renew_s:
            await self._bus.expire(self._key, _KEPT_MS)
            self._renew_s = now_s + _RENEW_S

    async def _read(self, take: Callable[[Routed], None]) -> None:
        backoff = Backoff()
        while True:
            try:
                cursors = {self._key: self._cursor}
                found = await self._bus.read(cursors, _BLOCK_MS, _MAX_ENTRIES)
                if not found and await self._ends.lost(cursors) is not None:
                    self._cursor, self._kept_bytes = START, 0
                    self._kept.clear()
            except BusUnavailable:
                await backoff.wait()  # a gateway that reads the directory reports it
                continue
            backoff.reset()
            for entry in found.get(self._key, ()):
                self._entry_read(entry)
                for data in entry.messages:
                    self._apply(data, take)
                await asyncio.sleep(0)  # a log of many entries is read at start

    def _entry_read(self, entry: Entry) -> None:
        self._cursor = entry.id
        self._kept.append((entry.id, entry.num_bytes))
        self._kept_bytes += entry.num_bytes
        while self._kept_bytes > MAX_LOG_BYTES:
            self._kept_bytes -= self._kept.popleft()[1]

    def _apply(self, data: bytes, take: Callable[[Routed], None]) -> None:
        try:
            routed = decode_as(Routed, data)
            if routed.gateway != self._name:
                take(routed)
        except DecodeError as error:
            _log.warning("route not read", error=error)
