"""Runs requests through the real scheduler and the real worker, both in this process.

The scheduler's input is recorded, so that a replay can inspect the pool after every step.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.micro.no_observer import NoObserver
from gpu_worker.service import WorkerService
from gpu_worker.startup.build import Worker
from scheduler_svc.observer import Observer
from scheduler_svc.recording import FileRecorder
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import START, Append
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import decode, encode
from shared.errors import PageStreamError
from shared.messages.outputs import BeamsEnded, RequestEnded, RequestState, StepResult
from shared.messages.requests import Submit
from shared.metrics import SchedulerMetrics

_READ_MS = 1_000
_MAX_ENTRIES = 100


class RequestFailed(PageStreamError):
    """The engine ended a request for another reason than its length."""


class _Follower:
    """Follows the requests in the outputs log.

    Args:
        submits: the requests.
        on_ended: called whenever one of them has ended.
    """

    def __init__(self, submits: Sequence[Submit], on_ended: Callable[[], None]) -> None:
        self.outputs: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
        self.num_left = len(submits)  # requests that have not ended
        self._on_ended = on_ended
        self._choices_left = {submit.request_id: submit.num_choices for submit in submits}
        self._by_handle: dict[int, tuple[str, int]] = {}  # request and choice

    def take(self, message: object) -> None:
        """Process the next message.

        Raises:
            RequestFailed: a request was refused or aborted.
        """
        match message:
            case RequestState():
                for known in message.choices:
                    self._by_handle[known.handle] = (message.submit.request_id, known.choice)
            case StepResult():
                self._continue(message)
            case BeamsEnded():
                self._end()
            case RequestEnded():
                raise RequestFailed(f"{message.request_id}: {message.reason}, {message.error}")

    def _continue(self, result: StepResult) -> None:
        ended = set(result.ended_rows.tolist())
        rows = zip(result.handles.tolist(), result.tokens.tolist(), strict=True)
        for row, (handle, token) in enumerate(rows):
            request_id, choice = self._by_handle[handle]
            if choice == 0:
                self.outputs[request_id].append(token)
            if row in ended:
                self._choices_left[request_id] -= 1
                if self._choices_left[request_id] == 0:
                    self._end()

    def _end(self) -> None:
        self.num_left -= 1
        self._on_ended()


async def run_live(
    worker: Worker,
    settings: SchedulerSettings,
    submits: Sequence[Submit],
    recording: Path,
    on_ended: Callable[[], None],
) -> dict[str, list[int]]:
    """Submit all requests at once and wait for their ends; the tokens of first choices, by request.

    Args:
        worker: with a loaded model.
        settings: of the scheduler.
        submits: requests; all end at their length.
        recording: file to write, for a replay.
        on_ended: called whenever a request has ended.

    Raises:
        RequestFailed: a request was refused.
    """
    bus = MemoryBus(lambda: time.monotonic_ns() // 1_000_000)
    engine_id, kv = settings.engine_id, worker.executor.limits.kv
    worker_service = WorkerService(
        bus, engine_id, worker.executor, worker.model, kv, worker.speeds, NoObserver()
    )
    observer = Observer(SchedulerMetrics(worker.model.name, engine_id))
    recorder = FileRecorder(recording)
    scheduler_service = SchedulerService(bus, settings, observer, recorder)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker_service.run())
            tasks.create_task(scheduler_service.run())
            try:
                outputs = await _generate(bus, EngineKeys(engine_id), submits, on_ended)
            finally:
                # Python 3.11's wait_for can lose a cancellation; stopped services end on their own.
                worker_service.stop()
                scheduler_service.stop()
    finally:
        recorder.close()
    return outputs


async def _generate(
    bus: MemoryBus,
    keys: EngineKeys,
    submits: Sequence[Submit],
    on_ended: Callable[[], None],
) -> dict[str, list[int]]:
    follower = _Follower(submits, on_ended)
    await bus.append(Append(keys.requests, [encode(submit) for submit in submits]))
    cursor = START
    while follower.num_left:
        found = await bus.read({keys.outputs: cursor}, _READ_MS, _MAX_ENTRIES)
        for entry in found.get(keys.outputs, ()):
            cursor = entry.id
            for data in entry.messages:
                follower.take(decode(data))
    return follower.outputs
