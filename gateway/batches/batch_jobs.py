"""Batches, as jobs."""

from gateway.batches.batch_run import BatchLimits, BatchRun
from gateway.batches.line_requests import LineRequests
from gateway.batches.store import BatchLog, BatchStore
from gateway.service import Service


class BatchJobs:
    """What a dispatcher does with batches; see ``JobKind``.

    Args:
        max_queued: batches of one API key that have not ended.
    """

    name = "batch"
    waiting = "batches"
    max_running = 64

    def __init__(
        self,
        service: Service,
        requests: LineRequests,
        store: BatchStore,
        max_queued: int,
        limits: BatchLimits,
    ) -> None:
        self._requests = requests
        self.queue = store.keys.batch_queue
        self.max_queued = max_queued
        self._service = service
        self._store = store
        self._limits = limits

    async def is_claimed(self, job_id: str) -> bool:
        return await self._store.is_claimed(job_id)

    async def has_ended(self, job_id: str) -> bool:
        state, _ = await self._store.read(job_id)
        return state is None or state.has_ended

    async def claim(self, job_id: str) -> BatchLog | None:
        return await self._store.claim(job_id, self._service.engine.instance)

    async def finish(self, log: BatchLog) -> None:
        await BatchRun(self._service, self._requests, self._store, log, self._limits).run()
