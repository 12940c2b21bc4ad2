"""Batches, as jobs."""

from gateway.batches.batch_run import BatchLimits, BatchRun
from gateway.batches.line_requests import LineRequests
from gateway.batches.store import BatchLog, BatchStore
from gateway.jobs.dispatcher import JobState
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

    async def state(self, job_id: str) -> JobState:
        state, _ = await self._store.read(job_id)
        if state is None or state.has_ended:
            return JobState.ENDED
        models = self._service.models
        found = [models.find(name) for name in state.models] or models.served
        is_ready = any(model is not None and model.ready for model in found)
        return JobState.READY if is_ready else JobState.WAITING

    async def claim(self, job_id: str) -> BatchLog | None:
        return await self._store.claim(job_id, self._service.instance)

    async def finish(self, log: BatchLog) -> None:
        await BatchRun(self._service, self._requests, self._store, log, self._limits).run()
