"""Validates a claimed batch, answers its lines, and ends it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Container
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from gateway.batches.body import BatchLine, parse_line
from gateway.batches.line_call import LineCall, LineResult, skipped_line
from gateway.batches.line_reader import Line, read_lines
from gateway.batches.line_requests import LineRequests
from gateway.batches.progress import LineProgress
from gateway.batches.records import Counts, LineError, Status
from gateway.batches.store import BatchLog, BatchStore
from gateway.batches.validation import CALLER, FileCheck, max_line_bytes
from gateway.jobs.claims import run_claimed
from gateway.service import Service
from shared.logs import EventLog
from shared.tasks import cancel_until_done

_log = EventLog("gateway.batches.batch_run")
_LINES_AHEAD = 1_000  # of the first that has no result
_LINES_AT_ONCE = 50  # that are read before other tasks have a turn
_SKIPPED_AT_ONCE = 1_000  # lines that get no answer, before they are written
_WHY = {
    Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLED: (
        "batch_cancelled",
        "This request was not executed: the batch was cancelled.",
    ),
    Status.COMPLETED: (
        "files_full",
        "This request was not executed: the files of this API key have no room for its answer.",
    ),
}
_GONE = "the input file was lost before all of its lines were executed"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on all batches of this gateway.

    Attributes:
        places: of lines that are answered at once.
        max_lines: of one batch.
    """

    places: "LinePlaces"
    max_lines: int


class LinePlaces:
    """Places of lines that are answered at once, for each model.

    So lines of a model whose engines are away keep none of another model's.
    """

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._by_model: dict[str, asyncio.Semaphore] = {}

    def of(self, line: BatchLine, models: Container[str]) -> asyncio.Semaphore:
        """The places for a line.

        Args:
            models: of the batch; lines that name others are refused, and share places.
        """
        name = line.model if line.model in models else ""
        return self._by_model.setdefault(name, asyncio.Semaphore(self._num_lines))


class BatchRun:
    """One claimed batch.

    Results wait in memory for a tenth of a second; then they are written together with the
    progress that they are.
    """

    def __init__(
        self,
        service: Service,
        requests: LineRequests,
        store: BatchStore,
        log: BatchLog,
        limits: BatchLimits,
    ) -> None:
        self._requests = requests
        self._service = service
        self._files = store.files
        self._store = store
        self._log = log
        self._limits = limits
        self._state = log.state  # with what is not written
        self._progress = LineProgress(log.state.progress)
        self._results: list[LineResult] = []  # that are not written
        self._flushing = asyncio.Lock()
        self._num_kept = 0  # bytes of the API key, when the last results were written
        self._num_waiting = 0  # bytes of results
        self._is_full = False  # the API key may keep no more
        self._is_over = False  # no gateway answers further lines
        self._metrics = service.metrics
        self._counted: Status | None = None  # in the gauge of batches

    async def run(self) -> None:
        """Bring the batch to its end.

        Raises:
            StaleWriter: another gateway has claimed it, or it was cancelled.
            BusUnavailable: Redis does not answer; what was not written is done again.
            TakenOver: another gateway answers its lines.
        """
        self._count_as(Status(self._state.status))
        try:
            await run_claimed(self._log, self._work(), self._flush, self._claim_lost)
        finally:
            self._count_as(None)
        state = self._log.state
        self._metrics.batches_ended[state.status].inc()
        completed, failed = state.counts.completed, state.counts.failed
        _log.info(
            "batch ended", id=state.id, status=state.status, completed=completed, failed=failed
        )

    def _count_as(self, status: Status | None) -> None:
        """Count the batch under another status; None: no more."""
        if self._counted is not None:
            self._metrics.batches[self._counted].dec()
        if status is not None:
            self._metrics.batches[status].inc()
        self._counted = status

    async def _work(self) -> None:
        if self._state.status == Status.VALIDATING:
            await self._validate()
        if self._state.status == Status.IN_PROGRESS:
            await self._answer_until_expired()
        if self._state.status in (Status.IN_PROGRESS, Status.CANCELLING):
            await self._account_for_all()
            now_s = int(time.time())
            self._state = replace(self._state, status=Status.FINALIZING, finalizing_s=now_s)
            self._count_as(Status.FINALIZING)
        await self._flush(always=True)
        has_failed = bool(self._state.errors)
        await self._log.end(Status.FAILED if has_failed else Status(self._state.ends_as))

    # -------------------------------------------------------------------- stages

    async def _validate(self) -> None:
        max_lines = self._limits.max_lines
        service = self._service
        check = FileCheck(self._files, service.bodies, service.models, self._state, max_lines)
        errors = tuple(await check.run())
        if errors:
            self._state = replace(self._state, errors=errors)
            return
        self._state = replace(
            self._state,
            status=Status.IN_PROGRESS,
            in_progress_s=int(time.time()),
            counts=Counts(total=check.num_lines),
            models=tuple(sorted(check.models)),
        )
        self._count_as(Status.IN_PROGRESS)
        await self._flush(always=True)

    async def _answer_until_expired(self) -> None:
        left_s = max(0.0, self._state.expires_s - time.time())
        try:
            async with asyncio.timeout(left_s) as window:
                await self._answer_lines()
        except TimeoutError:
            if not window.expired():
                raise
            self._state = replace(self._state, ends_as=Status.EXPIRED)

    async def _answer_lines(self) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self._lines_left()) as lines:
                async for line in lines:
                    assert line.data is not None, line.number
                    found = await self._service.bodies.parse(CALLER, line.data, parse_line)
                    places = self._limits.places.of(found, self._state.models)
                    await places.acquire()
                    task = asyncio.create_task(self._answer(line, found))
                    task.add_done_callback(partial(_release, places))
                    running.add(task)
                    running = _without_done(running)
                    while self._progress.ahead(line.number) > _LINES_AHEAD:
                        running = await _without_first(running)
                    if self._is_full:
                        break
            while running:
                running = await _without_first(running)
        finally:
            await cancel_until_done(*running)

    async def _account_for_all(self) -> None:
        """Give each line that has no answer, and gets none, its place in the file of errors."""
        ends_as = Status(self._state.ends_as)
        if self._state.counts.total and (self._is_full or ends_as != Status.COMPLETED):
            await self._skip_rest(*_WHY[ends_as])
        counts = self._state.counts
        if counts.completed + counts.failed < counts.total:
            self._state = replace(self._state, errors=(LineError("input_file_lost", _GONE),))

    async def _skip_rest(self, code: str, why: str) -> None:
        async with aclosing(self._lines_left()) as lines:
            async for line in lines:
                assert line.data is not None, line.number
                found = await self._service.bodies.parse(CALLER, line.data, parse_line)
                data = skipped_line(found.custom_id, line.number, self._state, code, why)
                self._take(line, LineResult(False, data))
                if len(self._results) >= _SKIPPED_AT_ONCE:
                    await self._flush()

    # --------------------------------------------------------------------- lines

    async def _lines_left(self) -> AsyncGenerator[Line, None]:
        """The lines without a result."""
        start, max_bytes = self._progress.snapshot(), max_line_bytes(self._service.bodies)
        async with aclosing(
            read_lines(self._files, self._state.input_file, start, max_bytes)
        ) as lines:
            async for line in lines:
                if line.number % _LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                self._progress.read(line)
                if line.is_blank:
                    self._progress.finish(line.number)
                elif not self._progress.is_done(line.number):
                    yield line

    async def _answer(self, line: Line, found: BatchLine) -> None:
        call = LineCall(self._service, self._requests, self._state, line.number, self._goes_on)
        self._take(line, await call.run(found))

    def _take(self, line: Line, result: LineResult) -> None:
        self._results.append(result)
        self._num_waiting += len(result.data)
        self._is_full |= self._num_kept + self._num_waiting > self._files.kept.limit
        self._progress.finish(line.number)
        counts, usage = self._state.counts, result.usage
        counts = replace(
            counts,
            completed=counts.completed + result.is_answer,
            failed=counts.failed + (not result.is_answer),
            prompt_tokens=counts.prompt_tokens + usage.prompt_tokens,
            cached_tokens=counts.cached_tokens + usage.cached_tokens,
            completion_tokens=counts.completion_tokens + usage.completion_tokens,
            reasoning_tokens=counts.reasoning_tokens + usage.reasoning_tokens,
        )
        self._state = replace(self._state, counts=counts)

    def _goes_on(self) -> bool:
        """Whether the engine is to go on with lines for which this gateway stops waiting."""
        return not self._is_over and time.time() < self._state.expires_s

    # ------------------------------------------------------------------- writing

    async def _flush(self, always: bool = False) -> None:
        """Write what is new."""
        async with self._flushing:
            results, self._results = self._results, []
            if not results and not always:
                return
            state = replace(self._state, progress=self._progress.snapshot())
            output = b"".join(result.data for result in results if result.is_answer)
            errors = b"".join(result.data for result in results if not result.is_answer)
            self._num_kept = await self._log.write(state, output, errors)
            self._num_waiting -= len(output) + len(errors)
            num_completed = sum(result.is_answer for result in results)
            self._metrics.batch_lines["completed"].inc(num_completed)
            self._metrics.batch_lines["failed"].inc(len(results) - num_completed)

    async def _claim_lost(self) -> None:
        """Find out why: another gateway goes on, or none does."""
        state, _ = await self._store.read(self._log.id)
        self._is_over = state is None or state.has_ended or state.status == Status.CANCELLING


def _release(places: asyncio.Semaphore, _: "asyncio.Task[None]") -> None:
    places.release()


def _without_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that go on; the failure of one that has ended is raised."""
    left = set()
    for task in running:
        if task.done():
            task.result()
        else:
            left.add(task)
    return left


async def _without_first(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a task has ended, and return those that go on."""
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return _without_done(running)
