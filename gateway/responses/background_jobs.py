"""Responses in the background, as jobs."""

from gateway.jobs.dispatcher import JobState
from gateway.responses.background_run import BackgroundRun, display_of
from gateway.responses.store import ResponseLog, ResponseStore
from gateway.service import Service


class BackgroundJobs:
    """What a dispatcher does with responses; see ``JobKind``.

    Args:
        max_queued: responses of one API key that have not ended.
    """

    name = "response"
    waiting = "background responses"
    max_running = 64

    def __init__(self, service: Service, store: ResponseStore, max_queued: int) -> None:
        self.queue = store.keys.response_queue
        self.max_queued = max_queued
        self._service = service
        self._store = store

    async def is_claimed(self, job_id: str) -> bool:
        return await self._store.is_claimed(job_id)

    async def state(self, job_id: str) -> JobState:
        found = await self._store.read(job_id)
        if found.asked is None or found.ended is not None:
            return JobState.ENDED
        model = self._service.models.find(display_of(found.asked).model)
        return JobState.READY if model is not None and model.ready else JobState.WAITING

    async def claim(self, job_id: str) -> ResponseLog | None:
        return await self._store.claim(job_id, self._service.instance)

    async def finish(self, log: ResponseLog) -> None:
        await BackgroundRun(self._service, log).run()
