"""A whole engine in one process: the real scheduler and the real worker, joined by a real bus."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpu_worker.observer import Observer as WorkerObserver
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.step.begun_step import BegunStep
from gpu_worker.step.compute_thread import compute_thread, premapper
from gpu_worker.step.executor import Executor
from scheduler_svc.observer import Observer as SchedulerObserver
from scheduler_svc.recording import FileRecorder
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode, encode
from shared.messages.endings import EndFlag
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Submit
from shared.metrics import SchedulerMetrics, WorkerMetrics

DEADLINE_S = 120
# Without a next plan a step lasts this long.
_STEP_S = 0.02


@dataclass
class Answer:
    """The content of the outputs log about one request."""

    num_choices: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice, once it has ended
    num_cached: list[int] = field(
        default_factory=list
    )  # of each admission: tokens that were in the prefix cache
    error: str = ""
    scores: list[float] = field(default_factory=list)  # of finished beams

    @property
    def tokens(self) -> list[int]:
        """Output of the first choice."""
        return self.outputs.get(0, [])

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first choice."""
        return self.finish_reasons.get(0)

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return len(self.finish_reasons) == self.num_choices

    def end(self, choice: int, reason: str) -> None:
        """Record the end of a choice; only the first reason counts."""
        self.finish_reasons.setdefault(choice, reason)


class Engine:
    """Submits requests and follows the outputs log, as a gateway does."""

    def __init__(self, bus: Bus, engine_id: str, metrics: SchedulerMetrics) -> None:
        self.metrics = metrics
        self.answers: dict[str, Answer] = {}
        self.num_results = 0
        self._bus = bus
        self._keys = EngineKeys(engine_id)
        self._cursor = EntryId(0, 0)
        self._by_handle: dict[int, tuple[Answer, int]] = {}  # with the choice

    async def generate(self, submits: Sequence[Submit]) -> list[Answer]:
        """Submit all requests at once and wait for their ends."""
        for submit in submits:
            self.answers[submit.request_id] = Answer(submit.num_choices)
        await self._bus.append(Append(self._keys.requests, [encode(submit) for submit in submits]))
        async with asyncio.timeout(DEADLINE_S):
            while not all(self.answers[s.request_id].is_complete for s in submits):
                await self.follow()
        return [self.answers[submit.request_id] for submit in submits]

    async def send(self, message: object) -> None:
        """Append a Stop or an Abort."""
        await self._bus.append(Append(self._keys.requests, [encode(message)]))  # type: ignore[arg-type]

    async def follow(self) -> None:
        """Process new entries of the log."""
        found = await self._bus.read({self._keys.outputs: self._cursor}, 1_000, 100)
        for entry in found.get(self._keys.outputs, ()):
            self._cursor = entry.id
            for data in entry.messages:
                self._take(decode(data))

    async def until_idle(self) -> None:
        """Wait until the scheduler's own metrics report that no block is in use."""
        async with asyncio.timeout(DEADLINE_S):
            while self.metrics.kv_cache_usage_perc._value.get() > 0:
                await asyncio.sleep(0.01)

    def num_preemptions(self, kind: str | None = None) -> int:
        """Preemptions since the start, of one kind or of any."""
        counters = self.metrics.num_preemptions
        kinds = counters if kind is None else (kind,)
        return sum(int(counters[found]._value.get()) for found in kinds)

    def _take(self, message: object) -> None:
        match message:
            case EpochStarted():
                self._by_handle.clear()
            case RequestState() if message.submit.sampling.beams is None:
                self._restate(message)
            case BeamsEnded():
                answer = self.answers[message.request_id]
                for choice, found in enumerate(message.hypotheses):
                    answer.outputs[choice] = found.tokens.tolist()
                    answer.scores.append(found.score)
                    answer.end(choice, found.finish_reason)
            case StepResult():
                self._continue(message)
            case ChoiceEnded():
                self.answers[message.request_id].end(message.choice, message.reason)
            case RequestEnded():
                answer = self.answers[message.request_id]
                for choice in range(answer.num_choices):
                    answer.end(choice, message.reason)
                answer.error = message.error

    def _restate(self, state: RequestState) -> None:
        answer = self.answers[state.submit.request_id]
        for handle in [h for h, (known, _) in self._by_handle.items() if known is answer]:
            del self._by_handle[handle]
        for known in state.choices:
            answer.outputs[known.choice] = known.output.tolist()
            if known.finish_reason:
                answer.end(known.choice, known.finish_reason)
            else:
                self._by_handle[known.handle] = (answer, known.choice)

    def _continue(self, result: StepResult) -> None:
        self.num_results += 1
        admitted = zip(
            result.admitted_handles.tolist(), result.admitted_computed.tolist(), strict=True
        )
        for handle, num_computed in admitted:
            if handle in self._by_handle:  # else it is of a beam search or of a pinned prefix
                self._by_handle[handle][0].num_cached.append(num_computed)
        flags = dict(zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=True))
        rows = zip(result.handles.tolist(), result.tokens.tolist(), strict=True)
        for row, (handle, token) in enumerate(rows):
            if handle not in self._by_handle:
                continue
            answer, choice = self._by_handle[handle]
            if choice not in answer.finish_reasons:
                answer.outputs[choice].append(token)
                if row in flags:
                    answer.end(choice, EndFlag(flags[row]).finish_reason())


@dataclass(frozen=True, slots=True)
class BusyStep:
    """A step that lasts until the next one has begun, if that comes in time."""

    begun: BegunStep
    followed: threading.Event

    def wait(self) -> None:
        self.followed.wait(_STEP_S)


class BusyDevice:
    """Overlapping steps of an executor.

    Attributes:
        num_overlapping: steps that began before the one before was finished.
    """

    def __init__(self, executor: Executor) -> None:
        self.num_overlapping = 0
        self.computing = ThreadPoolExecutor(1)
        self.waiting = ThreadPoolExecutor(1)
        self._executor = executor
        self._last: BusyStep | None = None

    def begin(self, plan: StepPlan) -> BusyStep:
        step = BusyStep(self._executor.begin(plan), threading.Event())
        if self._last is not None:
            self.num_overlapping += 1
            self._last.followed.set()
        self._last = step
        return step

    def finish(self, step: BusyStep) -> StepResult:
        if self._last is step:
            self._last = None
        return self._executor.finish(step.begun)

    def close(self) -> None:
        """Shut down; there must be no further step."""
        self.computing.shutdown()
        self.waiting.shutdown()


@asynccontextmanager
async def running_worker(
    bus: Bus, worker: WorkerSettings, engine_id: str, overlap: bool = False
) -> AsyncIterator[BusyDevice]:
    """Run the worker as a task inside the block; raises its errors.

    Args:
        overlap: steps begin before the one before has ended.
    """
    built = build_worker(worker)
    device = BusyDevice(built.executor)
    ahead = premapper(built.executor)
    service = WorkerService(
        bus,
        engine_id,
        built.executor,
        built.model,
        built.executor.limits.kv,
        built.speeds,
        WorkerObserver(WorkerMetrics("tiny", engine_id), built.executor),
        thread=device.computing
        if overlap
        else (None if ahead is None else compute_thread(built.executor.device)),
        premapper=ahead,
        pipeline=device if overlap else None,
        waiting=device.waiting,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.run())
            yield device
            service.stop()
    finally:
        device.close()


@asynccontextmanager
async def running_scheduler(
    bus: Bus,
    scheduler: SchedulerSettings,
    recorder: FileRecorder | None = None,
    directory: Bus | None = None,
) -> AsyncIterator[SchedulerMetrics]:
    """Run the scheduler as a task inside the block.

    Args:
        directory: of the fleet to which the engine belongs.
    """
    metrics = SchedulerMetrics("tiny", scheduler.engine_id)
    observer = SchedulerObserver(metrics)
    service = SchedulerService(bus, scheduler, observer, recorder, directory=directory)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(service.run())
        yield metrics
        service.stop()


@asynccontextmanager
async def running_engine(
    bus: Bus, worker: WorkerSettings, scheduler: SchedulerSettings
) -> AsyncIterator[Engine]:
    """Run both services inside the block."""
    async with (
        running_worker(bus, worker, scheduler.engine_id),
        running_scheduler(bus, scheduler) as metrics,
    ):
        yield Engine(bus, scheduler.engine_id, metrics)
