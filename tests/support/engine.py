"""A whole engine in one process: the real scheduler and the real worker, joined by a real bus."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpu_worker.assembly import build_worker
from gpu_worker.observer import Observer as WorkerObserver
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from scheduler_svc.observer import Observer as SchedulerObserver
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode, encode
from shared.messages import (
    EndFlag,
    RequestEnded,
    RequestState,
    StepResult,
    Submit,
)
from shared.metrics import SchedulerMetrics, WorkerMetrics

DEADLINE_S = 120
_ENGINE = "engine-0"


@dataclass
class Answer:
    """All that the log says of one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""


class Engine:
    """Submits requests and follows the outputs log, as a gateway does."""

    def __init__(self, bus: Bus, metrics: SchedulerMetrics) -> None:
        self.metrics = metrics
        self.answers: dict[str, Answer] = {}
        self.num_results = 0
        self._bus = bus
        self._keys = EngineKeys(_ENGINE)
        self._cursor = EntryId(0, 0)
        self._by_handle: dict[int, str] = {}

    async def generate(self, submits: Sequence[Submit]) -> list[Answer]:
        """Submit all at once and wait for all."""
        for submit in submits:
            self.answers[submit.request_id] = Answer()
        await self._bus.append(Append(self._keys.requests, [encode(submit) for submit in submits]))
        async with asyncio.timeout(DEADLINE_S):
            while any(self.answers[s.request_id].finish_reason is None for s in submits):
                await self.follow()
        return [self.answers[submit.request_id] for submit in submits]

    async def send(self, message: object) -> None:
        """Append a Stop or an Abort."""
        await self._bus.append(Append(self._keys.requests, [encode(message)]))  # type: ignore[arg-type]

    async def follow(self) -> None:
        """Take in what is new in the log."""
        found = await self._bus.read({self._keys.outputs: self._cursor}, 1_000, 100)
        for entry in found.get(self._keys.outputs, ()):
            self._cursor = entry.id
            for data in entry.messages:
                self._take(decode(data))

    async def until_idle(self) -> None:
        """Wait until the scheduler's own gauges say that no block is in use."""
        async with asyncio.timeout(DEADLINE_S):
            while self.metrics.kv_cache_usage_perc._value.get() > 0:
                await asyncio.sleep(0.01)

    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return int(self.metrics.num_preemptions["recompute"]._value.get())

    def _take(self, message: object) -> None:
        match message:
            case RequestState():
                self._by_handle[message.choices[0].handle] = message.submit.request_id
                self.answers[message.submit.request_id].tokens = message.choices[0].output.tolist()
            case StepResult():
                self.num_results += 1
                ended = dict(
                    zip(message.ended_rows.tolist(), message.ended_flags.tolist(), strict=True)
                )
                rows = zip(message.handles.tolist(), message.tokens.tolist(), strict=True)
                for row, (handle, token) in enumerate(rows):
                    answer = self.answers[self._by_handle[handle]]
                    if answer.finish_reason is None:
                        answer.tokens.append(token)
                        if row in ended:
                            answer.finish_reason = EndFlag(ended[row]).finish_reason()
            case RequestEnded():
                answer = self.answers[message.request_id]
                answer.finish_reason = answer.finish_reason or message.reason
                answer.error = message.error


@asynccontextmanager
async def running_engine(
    bus: Bus, worker: WorkerSettings, scheduler: SchedulerSettings
) -> AsyncIterator[Engine]:
    """Both services as tasks of this loop until the block is left; errors of theirs are raised."""
    built = build_worker(worker)
    worker_service = WorkerService(
        bus,
        _ENGINE,
        built.executor,
        built.model,
        built.executor.limits.kv,
        WorkerObserver(WorkerMetrics("tiny", _ENGINE), built.executor),
    )
    metrics = SchedulerMetrics("tiny", _ENGINE)
    scheduler_service = SchedulerService(bus, scheduler, SchedulerObserver(metrics))
    services = (worker_service, scheduler_service)
    async with asyncio.TaskGroup() as tasks:
        for service in services:
            tasks.create_task(service.run())
        yield Engine(bus, metrics)
        for service in services:
            service.stop()
