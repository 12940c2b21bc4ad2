"""The worker's loop: plans in, results out, for as long as an epoch names this worker.

While a step computes, the loop appends the result of the step before, renews the lease, reads the
next plan and leaves it with the thread that computes. The order of everything that is told is that
of the plans: a result is appended when the one before it is in the log, and not at all if that
failed. A step that was computed by then is forgotten with the rest; a result that nobody was told
of never was.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.kv.premap import LookAhead
from gpu_worker.lease import Lease, LeaseTaken
from gpu_worker.plan_reader import PlanEntry, PlanReader
from gpu_worker.step.plan_executor import Pipeline, PlanExecutor, StepObserver
from gpu_worker.step.step_queue import Computing
from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.ends import LogEnds
from shared.bus.keys import EngineKeys
from shared.codec import encode
from shared.errors import BusUnavailable, PageStreamError, StaleWriter
from shared.logs import EventLog
from shared.messages.leases import KVGeometry, ModelInfo, Speeds
from shared.messages.outputs import StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.tasks import cancel_until_done

_BLOCK_MS = 500  # an idle loop wakes this often to renew its lease
_RETRY_S = 0.5
_CHUNK_TOKENS = 512  # about as many as schedulers put into a step

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step whose result is not in the log yet."""

    step: int
    result: asyncio.Future[StepResult]  # there when the thread, or the device, is done
    epoch: int
    trim_below: EntryId  # of the outputs


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
        self._computing = Computing(executor, observer, clock_s, thread, pipeline, waiting)
        self._model = model
        self._kv = kv
        self._speeds = speeds
        self._look_ahead = look_ahead
        self._lease = Lease(bus, self._keys, rank, clock_s)
        self._ends = LogEnds(bus)
        self._stopping = asyncio.Event()
        # No step has been seen yet; a slow model's first long chunk must not outlive the lease.
        self._first_chunk_s = _CHUNK_TOKENS / speeds.prefill_tokens_per_s
        self._instance = ""
        self._life = uuid4().hex
        self._run_id = ""
        self._epoch: int | None = None  # None: not named, so nothing is executed
        self._step = 0  # last one executed
        self._untold: _Computed | None = None
        self._appended = START  # the last result

    @property
    def _longest_step_s(self) -> float:
        return max(self._first_chunk_s, self._computing.longest_s)

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return self._computing.unfinished is not None

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
            await self._computing.end()
            await self._leave()

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
        self._appended = START  # ids of a restarted server may be lower
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
                if (unfinished := self._computing.unfinished) is not None:
                    await plans.next_or(unfinished)
                if not plans.has_next():
                    self._computing.plan_is_late()
                    if not await self._tell():
                        await self._idle()
                    await self._keep_lease(plans)
                entry = await plans.next()
                if entry is not None:
                    await self._take(entry, plans)
            await self._tell()
        except InstanceOver:
            await self._tell()  # what was computed before that is right all the same
            raise
        finally:
            await plans.close()

    async def _keep_lease(self, plans: PlanReader) -> None:
        if not await self._lease.renew_if_due(self._longest_step_s):
            return
        # A reconnection may go unnoticed, and the server behind it have forgotten its last entries.
        if await self._bus.run_id() != self._run_id:
            raise InstanceOver("Redis was restarted")
        if await self._ends.lost({self._keys.plans: plans.cursor}) is not None:
            raise InstanceOver("plans has lost entries that were there: was it deleted?")

    async def _take(self, entry: PlanEntry, plans: PlanReader) -> None:
        for message in entry.messages:
            if self._stopping.is_set():
                return
            if isinstance(message, EpochStarted):
                await self._tell()
                await self._start(message)
            elif isinstance(message, StepPlan) and entry.id.epoch == self._epoch:
                async with self._looking_ahead(plans, message.step):
                    await self._carry_out(message, plans)
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
            await cancel_until_done(looking)
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
        self._epoch = None
        self._step = 0
        self._untold = None
        await self._computing.reset()

    async def _carry_out(self, plan: StepPlan, plans: PlanReader) -> None:
        if plan.step <= self._step:
            return
        if plan.step != self._step + 1:
            raise InstanceOver(f"step {plan.step} follows {self._step} in plans")
        assert self._epoch is not None, plan.step
        epoch, trim_below = self._epoch, _parse_id(plan)
        result = self._computing.begin(plan)
        is_ours = await self._tell()
        await self._keep_lease(plans)
        if not is_ours:
            await self._idle()  # what was computed is nobody's
            return
        self._step = plan.step
        self._untold = _Computed(plan.step, result, epoch, trim_below)

    async def _tell(self) -> bool:
        """Append the result that is not in the log yet, if there is one.

        Returns:
            Whether the epoch is still this worker's.

        Raises:
            InstanceOver: the plan was refused.
            Exception: whatever the model raised.
        """
        computed, self._untold = self._untold, None
        if computed is None:
            return True
        try:
            result = await computed.result
        except PlanRefused as error:
            self._life = uuid4().hex  # something in the plan may be to blame, as for a death
            raise InstanceOver(f"plan of step {computed.step}: {error}") from error
        append = Append(
            self._keys.outputs, [encode(result)], computed.epoch, trim_below=computed.trim_below
        )
        try:
            appended = await self._bus.append(append)
        except StaleWriter as error:
            log.warning("fenced off", epoch=computed.epoch, error=error)
            return False
        if appended <= self._appended:
            raise InstanceOver("outputs has lost entries that were there: was it deleted?")
        self._appended = appended
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
