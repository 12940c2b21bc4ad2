"""The worker's loop: plans in, results out, for as long as an epoch names this worker.

While a step computes, the loop appends the result of the step before, renews the lease, reads the
next plan and hands it to the compute thread. Results are appended in the order of the plans: each
one after the one before it is in the log. If an append fails, the results of later steps are
dropped together with the batch, although they may be computed already.
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
from gpu_worker.kv.premap import Premapper
from gpu_worker.lease import Lease, LeaseTaken
from gpu_worker.plan_reader import PlanEntry, PlanReader
from gpu_worker.ranks.member import ALONE, GroupOver, Member
from gpu_worker.step.plan_executor import Pipeline, PlanExecutor, StepObserver
from gpu_worker.step.step_queue import StepQueue
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
    result: asyncio.Future[StepResult]  # done when the thread or the device is
    epoch: int
    trim_below: EntryId  # older entries of the outputs log may be trimmed


class InstanceOver(PageStreamError):
    """This instance must end; the worker goes on as a new instance with an empty batch."""


class WorkerService:
    """The worker of one rank of an engine.

    Args:
        bus: holds the logs and the lease.
        engine_id: the engine to work for.
        executor: carries out plans on a loaded model.
        model: the model, as the lease describes it.
        kv: size of the KV pools.
        speeds: of prefill and of swapping on this machine.
        observer: records every step.
        member: rank and group of this worker in its engine.
        clock_s: monotonic time.
        ready: called whenever plans can be carried out.
        thread: computes steps; None: the loop computes them, and does nothing else meanwhile.
        premapper: maps blocks for the next plan while one is computed; None: nothing is mapped.
        pipeline: the executor's overlapping steps, which need ``thread``; None: no overlap.
        waiting: thread that waits for the device.
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
        member: Member = ALONE,
        clock_s: Callable[[], float] = time.monotonic,
        ready: Callable[[], None] = lambda: None,
        thread: futures.Executor | None = None,
        premapper: Premapper | None = None,
        pipeline: Pipeline[Any] | None = None,
        waiting: futures.Executor | None = None,
    ) -> None:
        self._bus = bus
        self._ready = ready
        self._keys = EngineKeys(engine_id)
        self._steps = StepQueue(executor, observer, clock_s, thread, pipeline, waiting)
        self._model = model
        self._kv = kv
        self._speeds = speeds
        self._premapper = premapper
        self._lease = Lease(bus, self._keys, member, clock_s)
        self._member = member
        self._ends = LogEnds(bus)
        self._stopping = asyncio.Event()
        # An estimate until steps are measured: a slow first chunk must not outlive the lease.
        self._first_chunk_s = _CHUNK_TOKENS / speeds.prefill_tokens_per_s
        self._instance = ""
        self._life = uuid4().hex
        self._run_id = ""
        self._epoch: int | None = None  # None: no epoch names this worker; plans are skipped
        self._step = 0  # the last one that was begun
        self._is_fenced = False  # off this epoch, whose plans are executed nevertheless
        self._unpublished: _Computed | None = None
        self._appended = START  # entry of the last result

    @property
    def _longest_step_s(self) -> float:
        return max(self._first_chunk_s, self._steps.longest_s)

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return self._steps.unfinished is not None

    def stop(self) -> None:
        """End after the current step."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve, as one instance after the other, until ``stop``.

        Raises:
            GroupOver: the group of this rank cannot go on.
            Exception: whatever the model raises in a step.
        """
        try:
            while not self._stopping.is_set():
                await self._run_instance_or_wait()
        finally:
            await self._steps.end()
            await self._release_lease()

    async def _run_instance_or_wait(self) -> None:
        try:
            await self._run_instance()
        except InstanceOver as reason:
            log.warning("instance over", instance=self._instance, reason=reason)
        except LeaseTaken as taken:
            if not self._member.is_alone:
                raise GroupOver(f"rank {self._member.rank}: {taken}") from taken
            log.warning("standing by", instance=self._instance, reason=taken)
            await self._stand_by()
        except BusUnavailable as error:
            log.warning("waiting for Redis", error=error)
            await self._pause()

    async def _stand_by(self) -> None:
        """Wait until no other worker holds the lease, through outages of Redis, or until ``stop``.

        If this process ended instead, its restart would take the engine back.
        """
        while not self._stopping.is_set():
            try:
                if not await self._lease.is_held_by_other():
                    return
            except BusUnavailable as error:
                log.warning("waiting for Redis", error=error)
            await self._pause()

    async def _run_instance(self) -> None:
        """Run one instance: a new name, an empty batch, and plans from the end of the log on."""
        self._appended = START  # ids of a restarted server may be lower
        self._instance = uuid4().hex
        await self._leave_epoch()
        self._run_id = await self._bus.run_id()
        cursor = await self._bus.last_id(self._keys.plans)
        await self._lease.acquire(
            self._instance, self._model, self._kv, self._speeds, self._longest_step_s, self._life
        )
        log.info("worker ready", instance=self._instance, plans_from=cursor)
        self._ready()
        plans = PlanReader(self._bus, self._keys.plans, cursor, _BLOCK_MS)
        try:
            while not self._stopping.is_set():
                if (unfinished := self._steps.unfinished) is not None:
                    await plans.next_or(unfinished)
                if not plans.has_next():
                    self._steps.mark_plan_late()
                    if not await self._publish_result():
                        await self._leave_epoch()
                    await self._renew_lease(plans)
                entry = await plans.next()
                if entry is not None:
                    await self._process_entry(entry, plans)
            await self._publish_result()
        except InstanceOver:
            await self._publish_result()  # the step before is still valid
            raise
        finally:
            await plans.close()

    async def _renew_lease(self, plans: PlanReader) -> None:
        if not await self._lease.renew_if_due(self._longest_step_s):
            return
        await self._check_peers()
        # The bus reconnects without a word, perhaps to a server that lost its last entries.
        if await self._bus.run_id() != self._run_id:
            raise InstanceOver("Redis was restarted or replaced")
        if await self._ends.lost({self._keys.plans: plans.cursor}) is not None:
            raise InstanceOver("plans has lost entries that were there: was it deleted?")

    async def _check_peers(self) -> None:
        """End with the group if another rank has left it.

        A rank whose lease has run out may be paused: without it no epoch begins.

        Raises:
            GroupOver: a lease names another group.
        """
        for rank in self._member.peers:
            lease = await self._lease.of_rank(rank)
            if lease is not None and lease.group != self._member.group:
                raise GroupOver(f"rank {rank} has left group {self._member.group}")

    async def _process_entry(self, entry: PlanEntry, plans: PlanReader) -> None:
        for message in entry.messages:
            if self._stopping.is_set():
                return
            if isinstance(message, EpochStarted):
                await self._publish_result()
                await self._join_epoch(message)
            elif isinstance(message, StepPlan) and entry.id.epoch == self._epoch:
                async with self._premapping(plans, message.step):
                    await self._execute(message, plans)
        if entry.fault is not None:
            raise InstanceOver(f"unreadable entry {entry.id} in plans: {entry.fault}")

    @asynccontextmanager
    async def _premapping(self, plans: PlanReader, step: int) -> AsyncIterator[None]:
        """Inside the block, premap the plan of the next step if it arrives in time."""
        if self._premapper is None:
            yield
            return
        premapping = asyncio.create_task(self._premapper.premap_next(plans, step))
        try:
            yield
        finally:
            await cancel_until_done(premapping)
        if not premapping.cancelled():
            premapping.result()

    async def _join_epoch(self, started: EpochStarted) -> None:
        await self._leave_epoch()
        if self._instance in started.workers:
            self._epoch = started.epoch
            log.info("named in epoch", epoch=started.epoch, scheduler=started.scheduler)
        else:
            log.info("not named in epoch", epoch=started.epoch, instance=self._instance)

    async def _leave_epoch(self) -> None:
        """Wait for a step under way, then drop the epoch and its sequences."""
        self._epoch = None
        self._step = 0
        self._is_fenced = False
        self._unpublished = None
        await self._steps.reset()

    async def _execute(self, plan: StepPlan, plans: PlanReader) -> None:
        if plan.step <= self._step:
            return
        if plan.step != self._step + 1:
            raise InstanceOver(f"step {plan.step} follows {self._step} in plans")
        assert self._epoch is not None, plan.step
        epoch, trim_below = self._epoch, _parse_id(plan)
        result = self._steps.begin(plan)
        may_write = await self._publish_result()
        await self._renew_lease(plans)
        if not may_write:
            await self._leave_epoch()  # the step that was just begun is dropped
            return
        self._step = plan.step
        self._unpublished = _Computed(plan.step, result, epoch, trim_below)

    async def _publish_result(self) -> bool:
        """Append the result that is not in the log yet, if there is one and this is rank 0.

        Where several ranks compute together, a fenced one goes on: the others may have begun the
        next step, and execute all plans up to the next epoch's start as well.

        Returns:
            False if a later epoch has fenced this worker off, and it must not go on.

        Raises:
            GroupOver: the same where several ranks compute together, which must begin anew.
            InstanceOver: the plan was refused, or the outputs log has lost entries.
            Exception: whatever the model raised.
        """
        computed, self._unpublished = self._unpublished, None
        if computed is None:
            return True
        try:
            result = await computed.result
        except PlanRefused as error:
            # A new life, as after a crash: the scheduler then suspects the requests of this plan.
            self._life = uuid4().hex
            reason = f"plan of step {computed.step}: {error}"
            raise (InstanceOver if self._member.is_alone else GroupOver)(reason) from error
        if self._member.rank or self._is_fenced:
            return True
        append = Append(
            self._keys.outputs, [encode(result)], computed.epoch, trim_below=computed.trim_below
        )
        try:
            appended = await self._bus.append(append)
        except StaleWriter as error:
            log.warning("fenced off", epoch=computed.epoch, error=error)
            self._is_fenced = not self._member.is_alone
            return self._is_fenced
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

    async def _release_lease(self) -> None:
        try:
            await self._lease.release()
        except BusUnavailable as error:
            log.warning("lease not released: Redis is unavailable", error=error)
        log.info("worker stopped")


def _parse_id(plan: StepPlan) -> EntryId:
    try:
        return EntryId.parse(plan.outputs_min_id)
    except ValueError as error:
        raise InstanceOver(f"plan of step {plan.step}: {error}") from None
