"""The worker's loop: plans in, results out, for as long as an epoch names this worker."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

from gpu_worker.admissible import PlanRefused
from gpu_worker.lease import Lease, LeaseTaken
from shared.bus.api import Append, Bus, Entry, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import decode, encode
from shared.errors import BusUnavailable, DecodeError, PageStreamError, StaleWriter
from shared.logs import EventLog
from shared.messages import EpochStarted, KVGeometry, ModelInfo, Speeds, StepPlan, StepResult

_BLOCK_MS = 500  # an idle loop wakes this often to renew its lease
_RETRY_S = 0.5
_MAX_ENTRIES = 64
_CHUNK_TOKENS = 512  # about as many as schedulers put into a step

log = EventLog(__name__)


class PlanExecutor(Protocol):
    """What carries out plans; the loop knows no more of it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises:
            PlanRefused: it does not fit what went before.
        """

    def reset(self) -> None:
        """Forget all sequences."""


class StepObserver(Protocol):
    """Hears of every step whose result is in the log."""

    def step(self, result: StepResult) -> None:
        """Take note of one."""


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
    """

    def __init__(
        self,
        bus: Bus,
        engine_id: str,
        executor: PlanExecutor,
        model: ModelInfo,
        kv: KVGeometry,
        speeds: Speeds,
        observer: StepObserver,
        rank: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
        ready: Callable[[], None] = lambda: None,
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
        self._lease = Lease(bus, self._keys, rank, clock_s)
        self._stopping = asyncio.Event()
        # No step has been seen yet; a slow model's first long chunk must not outlive the lease.
        self._longest_step_s = _CHUNK_TOKENS / speeds.prefill_tokens_per_s
        self._instance = ""
        self._life = uuid4().hex
        self._run_id = ""
        self._epoch: int | None = None  # None: not named, so nothing is executed
        self._step = 0  # last one executed

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
        self._instance = uuid4().hex
        self._idle()
        self._run_id = await self._bus.run_id()
        cursor = await self._bus.last_id(self._keys.plans)
        await self._lease.ready(
            self._instance, self._model, self._kv, self._speeds, self._longest_step_s, self._life
        )
        log.info("worker ready", instance=self._instance, plans_from=cursor)
        self._ready()
        while not self._stopping.is_set():
            await self._keep_lease()
            found = await self._bus.read({self._keys.plans: cursor}, _BLOCK_MS, _MAX_ENTRIES)
            for entry in found.get(self._keys.plans, ()):
                if self._stopping.is_set():
                    return
                await self._take(entry)
                cursor = entry.id

    async def _keep_lease(self) -> None:
        if not await self._lease.renew_if_due(self._longest_step_s):
            return
        # A reconnection may go unnoticed, and the server behind it have forgotten its last entries.
        if await self._bus.run_id() != self._run_id:
            raise InstanceOver("Redis was restarted")

    async def _take(self, entry: Entry) -> None:
        for data in entry.messages:
            try:
                message = decode(data)
            except DecodeError as error:
                raise InstanceOver(f"unreadable entry {entry.id} in plans: {error}") from None
            if isinstance(message, EpochStarted):
                self._start(message)
            elif isinstance(message, StepPlan) and entry.id.epoch == self._epoch:
                await self._carry_out(message)
                await self._keep_lease()

    def _start(self, started: EpochStarted) -> None:
        self._idle()
        if self._instance in started.workers:
            self._epoch = started.epoch
            log.info("named in epoch", epoch=started.epoch, scheduler=started.scheduler)
        else:
            log.info("not named in epoch", epoch=started.epoch, instance=self._instance)

    def _idle(self) -> None:
        """Forget the epoch and its sequences."""
        self._epoch = None
        self._step = 0
        self._executor.reset()

    async def _carry_out(self, plan: StepPlan) -> None:
        if plan.step <= self._step:
            return
        if plan.step != self._step + 1:
            raise InstanceOver(f"step {plan.step} follows {self._step} in plans")
        trim_below = _parse_id(plan)
        began = self._clock_s()
        try:
            result = self._executor.execute(plan)
        except PlanRefused as error:
            self._life = uuid4().hex  # something in the plan may be to blame, as for a death
            raise InstanceOver(f"plan of step {plan.step}: {error}") from error
        self._step = plan.step
        self._longest_step_s = max(self._longest_step_s, self._clock_s() - began)
        append = Append(self._keys.outputs, [encode(result)], self._epoch, trim_below=trim_below)
        try:
            await self._bus.append(append)
        except StaleWriter as error:
            log.warning("fenced off", epoch=self._epoch, error=error)
            self._idle()
            return
        self._observer.step(result)

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
