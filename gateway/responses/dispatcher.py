"""Claims responses in the background that no gateway finishes, and finishes them."""

import asyncio
from collections import Counter
from contextlib import suppress

from gateway.engine.engine_status import Engine
from gateway.http.errors import ApiError, overloaded
from gateway.responses.background_run import BackgroundRun
from gateway.responses.records import QueuedResponse, ResponseAsked
from gateway.responses.store import ResponseLog, ResponseStore
from gateway.service import Service
from shared.bus.api import START
from shared.codec import decode_as
from shared.errors import BusError, DecodeError
from shared.logs import EventLog
from shared.tasks import cancel_until_done

_log = EventLog("gateway.responses.dispatcher")
_POLL_S = 1.0
_MOST_QUEUED = 10_000  # of all API keys
_MOST_RUNNING = 64  # of this gateway


class Dispatcher:
    """Runs responses in the background, its own at once, and others that it finds in the queue.

    Args:
        max_queued: responses of one API key that have not ended.
    """

    def __init__(self, service: Service, store: ResponseStore, max_queued: int) -> None:
        self._service = service
        self._store = store
        self._max_queued = max_queued
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()  # by API key, when the queue was looked at last
        self._num_queued = 0
        self._ended: set[str] = set()  # that the queue holds

    async def run(self) -> None:
        """Run responses until cancelled; what runs is left for another gateway."""
        try:
            while True:
                try:
                    self._forget_done()
                    await self._look()
                except (BusError, DecodeError) as error:
                    _log.warning("cannot look for responses", error=error)
                await asyncio.sleep(_POLL_S)
        finally:
            await cancel_until_done(*self._running.values())

    def check_room(self, tenant: str) -> None:
        """Refuse one more response in the background.

        Raises:
            ApiError: 429.
        """
        if self._waiting[tenant] >= self._max_queued:
            raise overloaded(f"{self._max_queued} background responses with this API key go on")
        if self._num_queued >= _MOST_QUEUED:
            raise overloaded(f"{_MOST_QUEUED} background responses are queued")

    async def begin(self, asked: ResponseAsked) -> None:
        """Queue a response and run it here; nothing happens if there is one of this id."""
        log = await self._store.begin(asked, self._service.engine.instance)
        if log is not None:
            self._waiting[asked.tenant] += 1
            self._num_queued += 1
            self._start(asked.id, log)

    def _start(self, response_id: str, log: ResponseLog | None) -> None:
        self._running[response_id] = asyncio.create_task(self._finish(response_id, log))

    def _forget_done(self) -> None:
        self._running = {name: task for name, task in self._running.items() if not task.done()}

    async def _look(self) -> None:
        """Start what is queued and runs nowhere; trim what has ended from the queue's front."""
        queue, store = self._store.keys.response_queue, self._store
        entries = (await store.bus.read({queue: START}, 0, _MOST_QUEUED)).get(queue, [])
        waiting: Counter[str] = Counter()
        names, trim_below = set(), None
        for entry in entries:
            queued: QueuedResponse = decode_as(QueuedResponse, entry.messages[0])
            names.add(queued.id)
            if queued.id not in self._ended and await self._has_ended(queued.id):
                self._ended.add(queued.id)
            if queued.id not in self._ended:
                waiting[queued.tenant] += 1
            elif not waiting:
                trim_below = entry.id._replace(seq=entry.id.seq + 1)
        if trim_below is not None:
            await store.bus.trim(queue, trim_below)
        self._ended &= names
        self._waiting, self._num_queued = waiting, len(entries)

    async def _has_ended(self, response_id: str) -> bool:
        """Whether a queued response has ended; one that nobody finishes is claimed."""
        if response_id in self._running or await self._store.is_claimed(response_id):
            return False
        found = await self._store.read(response_id)
        if found.asked is None or found.ended is not None:
            return True
        is_ready = isinstance(self._service.engine.status, Engine) and not self._service.draining
        if is_ready and len(self._running) < _MOST_RUNNING:
            self._start(response_id, None)
        return False

    async def _finish(self, response_id: str, log: ResponseLog | None) -> None:
        try:
            if log is None:
                log = await self._store.claim(response_id, self._service.engine.instance)
                if log is None:
                    return
                _log.info("response claimed", id=response_id, tokens=len(log.stored.tokens))
            await BackgroundRun(self._service, log).run()
        except (BusError, DecodeError, ApiError) as error:
            # It was cancelled, or another gateway has it, or one claims it when the lease ends.
            _log.info("response interrupted", id=response_id, error=repr(error))
        except Exception:
            _log.exception("response failed", id=response_id)
        finally:
            if log is not None and self._service.draining:
                with suppress(BusError):
                    await log.release()
