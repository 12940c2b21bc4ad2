"""Claims jobs that no gateway works on, and runs them."""

import asyncio
from collections import Counter
from contextlib import suppress
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from gateway.http.errors import ApiError, overloaded
from gateway.jobs.claims import ClaimedLog
from gateway.jobs.records import MOST_QUEUED, QueuedJob
from gateway.service import Service
from shared.bus.api import START, Append, Bus
from shared.codec import decode_as, encode
from shared.errors import BusError, DecodeError
from shared.logs import EventLog
from shared.tasks import cancel_until_done

_log = EventLog("gateway.jobs.dispatcher")
_L = TypeVar("_L", bound=ClaimedLog)
_POLL_S = 1.0


class JobState(Enum):
    """Whether a job can be worked on."""

    ENDED = auto()  # nothing is left to do, or it is forgotten
    READY = auto()
    WAITING = auto()  # no engine can go on with it now


class JobKind(Protocol[_L]):
    """Jobs of one kind.

    Attributes:
        name: of one job, for logs.
        queue: key of the log of jobs that may not have ended.
        waiting: what they are, for the message that there are too many.
        max_queued: jobs of one API key that have not ended.
        max_running: jobs that one gateway works on at once.
    """

    name: str
    queue: str
    waiting: str
    max_queued: int
    max_running: int

    async def is_claimed(self, job_id: str) -> bool:
        """A gateway is at work."""

    async def state(self, job_id: str) -> JobState:
        """Whether something is left to do, and can be done now."""

    async def claim(self, job_id: str) -> _L | None:
        """Become the one that finishes a job; None: it has ended, or is forgotten.

        Raises:
            StaleWriter: another gateway claims it just now.
        """

    async def finish(self, log: _L) -> None:
        """Work on a claimed job until it has ended."""


class Dispatcher(Generic[_L]):
    """Runs jobs of one kind, its own at once, and others that it finds in the queue."""

    def __init__(self, service: Service, bus: Bus, kind: JobKind[_L]) -> None:
        self._service = service
        self._bus = bus
        self._kind = kind
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()  # by API key, when the queue was looked at last
        self._num_queued = 0
        self._ended: set[str] = set()  # that the queue holds

    async def run(self) -> None:
        """Run jobs until cancelled; what runs is left for another gateway."""
        try:
            while True:
                try:
                    self._forget_done()
                    await self._look()
                except (BusError, DecodeError) as error:
                    _log.warning("cannot look for jobs", kind=self._kind.name, error=error)
                await asyncio.sleep(_POLL_S)
        finally:
            await cancel_until_done(*self._running.values())

    def check_room(self, tenant: str) -> None:
        """Refuse one more job.

        Raises:
            ApiError: 429.
        """
        kind = self._kind
        if self._waiting[tenant] >= kind.max_queued:
            raise overloaded(f"{kind.max_queued} {kind.waiting} with this API key go on")
        if self._num_queued >= MOST_QUEUED:
            raise overloaded(f"{MOST_QUEUED} {kind.waiting} are queued")

    async def begin(self, log: _L, tenant: str) -> None:
        """Queue a new job that this gateway has claimed, and run it here."""
        # Without an entry in the queue it would end with this gateway alone.
        await self._bus.append(Append(self._kind.queue, [encode(QueuedJob(log.id, tenant))]))
        self._waiting[tenant] += 1
        self._num_queued += 1
        self.take(log)

    def take(self, log: _L) -> None:
        """Run a job that this gateway has just claimed, after what runs of it here.

        That ends by itself as soon as it finds out.
        """
        earlier = self._running.get(log.id)
        self._running[log.id] = asyncio.create_task(self._finish_after(earlier, log))

    def _forget_done(self) -> None:
        self._running = {name: task for name, task in self._running.items() if not task.done()}

    async def _look(self) -> None:
        """Start what is queued and runs nowhere; trim what has ended from the queue's front."""
        queue = self._kind.queue
        entries = (await self._bus.read({queue: START}, 0, MOST_QUEUED)).get(queue, [])
        waiting: Counter[str] = Counter()
        names, trim_below = set(), None
        for entry in entries:
            queued: QueuedJob = decode_as(QueuedJob, entry.messages[0])
            names.add(queued.id)
            if queued.id not in self._ended and await self._has_ended(queued.id):
                self._ended.add(queued.id)
            if queued.id not in self._ended:
                waiting[queued.tenant] += 1
            elif not waiting:
                trim_below = entry.id._replace(seq=entry.id.seq + 1)
        if trim_below is not None:
            await self._bus.trim(queue, trim_below)
        self._ended &= names
        self._waiting, self._num_queued = waiting, len(entries)

    async def _has_ended(self, job_id: str) -> bool:
        """Whether a queued job has ended; one that no gateway works on is claimed."""
        if job_id in self._running or await self._kind.is_claimed(job_id):
            return False
        state = await self._kind.state(job_id)
        if state is JobState.ENDED:
            return True
        is_ready = state is JobState.READY and not self._service.draining
        if is_ready and len(self._running) < self._kind.max_running:
            self._running[job_id] = asyncio.create_task(self._finish(job_id, None))
        return False

    async def _finish_after(self, earlier: "asyncio.Task[None] | None", log: _L) -> None:
        if earlier is not None:
            try:
                await asyncio.wait([earlier])
            finally:
                await cancel_until_done(earlier)
        await self._finish(log.id, log)

    async def _finish(self, job_id: str, log: _L | None) -> None:
        name = self._kind.name
        try:
            if log is None:
                log = await self._kind.claim(job_id)
                if log is None:
                    return
                _log.info(f"{name} claimed", id=job_id)
            await self._kind.finish(log)
        except (BusError, DecodeError, ApiError) as error:
            # It was cancelled, or another gateway has it, or one claims it when the lease ends.
            _log.info(f"{name} interrupted", id=job_id, error=repr(error))
        except Exception:
            _log.exception(f"{name} failed", id=job_id)
        finally:
            if log is not None and self._service.draining:
                with suppress(BusError):
                    await log.release()
