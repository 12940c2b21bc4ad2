"""The worker's loop: plans in, results out, for as long as an epoch names this worker.

While a step computes, the loop appends the result of the step before, renews the lease, reads the
next plan and leaves it with the thread that computes. The order of everything that is told is that
of the plans: a result is appended when the one before it is in the log, and not at all if that
failed. A step that was computed by then is forgotten with the rest; a result that nobody was told
of never was.

On a GPU a step is begun before the one before has ended, its plan only has to be there; on a CPU it
begins when that one has ended, without asking the loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gpu_worker.admissible import PlanRefused
from gpu_worker.lease import Lease, LeaseTaken
from gpu_worker.look_ahead import LookAhead
from gpu_worker.plan_executor import Pipeline, PlanExecutor, StepObserver
from gpu_worker.plan_reader import PlanEntry, PlanReader
from shared.bus.api import Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import encode
from shared.errors import BusUnavailable, PageStreamError, StaleWriter
from shared.logs import EventLog
from shared.messages import EpochStarted, KVGeometry, ModelInfo, Speeds, StepPlan, StepResult

_BLOCK_MS = 500  # an idle loop wakes this often to renew its lease
_RETRY_S = 0.5
_CHUNK_TOKENS = 512  # about as many as schedulers put into a step

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step whose result is not in the log yet."""

    result: asyncio.Future[StepResult]  # there when the thread, or the device, is done
    epoch: int
    trim_below: EntryId  # of the outputs


@dataclass(frozen=True, slots=True)
class _Executed:
    """A step that was carried out, and when."""

    result: StepResult
    began_s: float
    ended_s: float
    look: Any  # the observer's


class InstanceOver(PageStreamError):
    """This instance cannot go on; the same worker can, under a new name."""


class WorkerService:
    """One rank of an engine.

    Args:
        bus: where the logs are.
        engine_id: the engine to work for.
        executor: a loaded model.
        model: what it serves.
        kv: its pools.
        speeds: what preemption costs here.
        observer: gets every step.
        rank: its place among the engine's workers.
        clock_s: monotonic time.
        ready: called whenever plans can be carried out.
        thread: computes steps; None: the loop does, and can do nothing else meanwhile.
        look_ahead: prepares for the next plan while one is computed.
        pipeline: what the executor can do if steps may overlap; asks for ``thread``.
        waiting: a thread that has nothing to do but to wait for the device.
    """

    def __init__(
        self,
        bus: Bus,
        engine_id: str,
        executor: PlanExecutor,
        model: ModelInfo,
        kv: KVGeometry,
        speeds: Speeds,
        observer: StepObserver[Any],
        rank: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
        ready: Callable[[], None] = lambda: None,
        thread: futures.Executor | None = None,
        look_ahead: LookAhead | None = None,
        pipeline: Pipeline[Any] | None = None,
        waiting: futures.Executor | None = None,
    ) -> None:
        self._bus = bus
        self._ready = ready
        self._keys = EngineKeys(engine_id)
        self._executor = executor
        self._model = model
        self._kv = kv
        self._speeds = speeds
        self._observer = observer
        self._rank = rank
        self._clock_s = clock_s
        self._thread = thread
        self._look_ahead = look_ahead
        self._pipeline = pipeline
        self._waiting = waiting
        self._lease = Lease(bus, self._keys, rank, clock_s)
        self._stopping = asyncio.Event()
        # No step has been seen yet; a slow model's first long chunk must not outlive the lease.
        self._longest_step_s = _CHUNK_TOKENS / speeds.prefill_tokens_per_s
        self._instance = ""
        self._life = uuid4().hex
        self._run_id = ""
        self._epoch: int | None = None  # None: not named, so nothing is executed
        self._step = 0  # last one executed
        self._untold: _Computed | None = None
        self._last: asyncio.Future[StepResult] | None = None  # of the step that was begun last
        self._ended_s: float | None = None  # when it was computed, if the next plan was there
        self._failed: Exception | None = None  # in a step; those behind it are not carried out

    def stop(self) -> None:
        """End after the current step."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve one instance after the other until stopped.

        Raises:
            Exception: whatever the model raises in a step.
        """
        try:
            while not self._stopping.is_set():
                await self._live_once()
        finally:
            await self._end_last()
            await self._leave()

    async def _end_last(self) -> None:
        """Wait for a step that is under way; nobody wants its result, nor why there is none."""
        last, self._last = self._last, None
        if last is not None and not last.done():
            await asyncio.wait([last])
        if last is not None and not last.cancelled():
            last.exception()

    async def _live_once(self) -> None:
        try:
            await self._live()
        except InstanceOver as reason:
            log.warning("instance over", instance=self._instance, reason=reason)
        except LeaseTaken as taken:
            log.warning("standing by", instance=self._instance, reason=taken)
            while not self._stopping.is_set() and await self._lease.is_foreign():
                await self._pause()
        except BusUnavailable as error:
            log.warning("waiting for Redis", error=error)
            await self._pause()

    async def _live(self) -> None:
        """One instance: an empty batch, a fresh name, and plans from here on."""
        self._instance = uuid4().hex
        await self._idle()
        self._run_id = await self._bus.run_id()
        cursor = await self._bus.last_id(self._keys.plans)
        await self._lease.ready(
            self._instance, self._model, self._kv, self._speeds, self._longest_step_s, self._life
        )
        log.info("worker ready", instance=self._instance, plans_from=cursor)
        self._ready()
        plans = PlanReader(self._bus, self._keys.plans, cursor, _BLOCK_MS)
        try:
            while not self._stopping.is_set():
                if not plans.has_next():
                    await self._end_or_plan(plans)
                if not plans.has_next():
                    self._ended_s = None
                    if not await self._tell():
                        await self._idle()
                    await self._keep_lease()
                entry = await plans.next()
                if entry is not None:
                    await self._take(entry, plans)
            await self._tell()
        except InstanceOver:
            await self._tell()  # what was computed before that is right all the same
            raise
        finally:
            await plans.close()

    async def _end_or_plan(self, plans: PlanReader) -> None:
        """While a device is busy: until it is not, or can be given the next plan."""
        if self._last is None or self._last.done():
            return
        coming = asyncio.create_task(plans.peek())
        either: list[asyncio.Future[Any]] = [coming, self._last]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        coming.cancel()
        await asyncio.wait([coming])
        if not coming.cancelled():
            coming.exception()  # whoever asks for the plan meets it, too

    async def _keep_lease(self) -> None:
        if not await self._lease.renew_if_due(self._longest_step_s):
            return
        # A reconnection may go unnoticed, and the server behind it have forgotten its last entries.
        if await self._bus.run_id() != self._run_id:
            raise InstanceOver("Redis was restarted")

    async def _take(self, entry: PlanEntry, plans: PlanReader) -> None:
        for message in entry.messages:
            if self._stopping.is_set():
                return
            if isinstance(message, EpochStarted):
                await self._tell()
                await self._start(message)
            elif isinstance(message, StepPlan) and entry.id.epoch == self._epoch:
                async with self._looking_ahead(plans, message.step):
                    await self._carry_out(message)
        if entry.fault is not None:
            raise InstanceOver(f"unreadable entry {entry.id} in plans: {entry.fault}")

    @asynccontextmanager
    async def _looking_ahead(self, plans: PlanReader, step: int) -> AsyncIterator[None]:
        """Meanwhile prepare for the plan after this step's, if it comes in time."""
        if self._look_ahead is None:
            yield
            return
        looking = asyncio.create_task(self._look_ahead.prepare(plans, step))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()

    async def _start(self, started: EpochStarted) -> None:
        await self._idle()
        if self._instance in started.workers:
            self._epoch = started.epoch
            log.info("named in epoch", epoch=started.epoch, scheduler=started.scheduler)
        else:
            log.info("not named in epoch", epoch=started.epoch, instance=self._instance)

    async def _idle(self) -> None:
        """Forget the epoch and its sequences, once no step is under way."""
        last, self._last = self._last, None
        if last is not None:
            with suppress(InstanceOver):  # of a plan that nobody wants any more
                await last
        self._failed = None
        self._epoch = None
        self._step = 0
        self._untold = None
        self._ended_s = None
        self._executor.reset()

    async def _carry_out(self, plan: StepPlan) -> None:
        if plan.step <= self._step:
            return
        if plan.step != self._step + 1:
            raise InstanceOver(f"step {plan.step} follows {self._step} in plans")
        assert self._epoch is not None, plan.step
        epoch, trim_below = self._epoch, _parse_id(plan)
        computing = asyncio.create_task(self._compute(plan))
        try:
            is_ours = await self._tell()
            await self._keep_lease()
        finally:
            # Whatever went wrong: a step cannot be stopped, and nothing may begin beside it.
            await asyncio.wait([computing])
            failure = computing.exception()
        if failure is not None:
            raise failure
        if not is_ours:
            await self._idle()  # what was computed is nobody's
            return
        self._step = plan.step
        self._untold = _Computed(computing.result(), epoch, trim_below)

    async def _compute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Execute a plan, or see to it that it will be: behind the one before.

        Raises:
            InstanceOver: the plan was refused.
        """
        if self._pipeline is not None:
            result = await self._begin(plan, self._pipeline)
        elif self._thread is not None:
            result = self._queue(plan, self._thread)
        else:
            result = asyncio.get_running_loop().create_future()
            result.set_result(self._note(self._execute(plan)))
        self._last = result
        return result

    def _queue(self, plan: StepPlan, thread: futures.Executor) -> asyncio.Future[StepResult]:
        """Let the thread go on with this plan as soon as it is done with what it has."""
        computed = asyncio.get_running_loop().run_in_executor(thread, self._execute, plan)

        async def finish() -> StepResult:
            return self._note(await computed)

        return asyncio.create_task(finish())

    def _execute(self, plan: StepPlan) -> _Executed:
        """Carry out a plan, unless one before it failed; on whatever thread."""
        if self._failed is not None:
            raise self._failed
        began_s = self._clock_s()
        try:
            with self._refusing(plan):
                result = self._executor.execute(plan)
        except Exception as error:
            self._failed = error
            raise
        return _Executed(result, began_s, self._clock_s(), self._observer.look())

    def _note(self, executed: _Executed) -> StepResult:
        """Take note of when a step was computed, on the loop."""
        began_s, ended_s = executed.began_s, executed.ended_s
        self._longest_step_s = max(self._longest_step_s, ended_s - began_s)
        overhead_s = None if self._ended_s is None else began_s - self._ended_s
        self._ended_s = ended_s
        self._observer.step(executed.result, executed.look, overhead_s)
        return executed.result

    async def _begin(self, plan: StepPlan, pipeline: Pipeline[Any]) -> asyncio.Future[StepResult]:
        """Let the device begin; the result comes when it is done."""
        loop = asyncio.get_running_loop()
        before, began_s = self._last, self._clock_s()
        busy = before is not None and not before.done()
        with self._refusing(plan):
            step = await loop.run_in_executor(self._thread, pipeline.begin, plan)
        overhead_s: float | None = 0.0
        if not busy:
            overhead_s = None if self._ended_s is None else began_s - self._ended_s

        async def finish() -> StepResult:
            await loop.run_in_executor(self._waiting, step.wait)
            result, look = await loop.run_in_executor(self._thread, self._finish, step)
            self._ended_s = self._clock_s()
            self._longest_step_s = max(self._longest_step_s, self._ended_s - began_s)
            self._observer.step(result, look, overhead_s)
            return result

        return asyncio.create_task(finish())

    def _finish(self, step: Any) -> tuple[StepResult, Any]:
        assert self._pipeline is not None, step
        return self._pipeline.finish(step), self._observer.look()

    @contextmanager
    def _refusing(self, plan: StepPlan) -> Iterator[None]:
        """A plan that is refused ends the instance."""
        try:
            yield
        except PlanRefused as error:
            self._life = uuid4().hex  # something in the plan may be to blame, as for a death
            raise InstanceOver(f"plan of step {plan.step}: {error}") from error

    async def _tell(self) -> bool:
        """Append the result that is not in the log yet, if there is one.

        Returns:
            Whether the epoch is still this worker's.

        Raises:
            Exception: whatever the model raised.
        """
        computed, self._untold = self._untold, None
        if computed is None:
            return True
        append = Append(
            self._keys.outputs,
            [encode(await computed.result)],
            computed.epoch,
            trim_below=computed.trim_below,
        )
        try:
            await self._bus.append(append)
        except StaleWriter as error:
            log.warning("fenced off", epoch=computed.epoch, error=error)
            return False
        return True

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_RETRY_S):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _leave(self) -> None:
        try:
            await self._lease.release()
        except BusUnavailable as error:
            log.warning("Redis is gone already", error=error)
        log.info("worker stopped")


def _parse_id(plan: StepPlan) -> EntryId:
    try:
        return EntryId.parse(plan.outputs_min_id)
    except ValueError as error:
        raise InstanceOver(f"plan of step {plan.step}: {error}") from None
