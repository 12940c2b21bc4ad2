"""The scheduler's loop: logs in, plans out, one epoch after the other."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

from scheduler_svc.core.config import ProtocolError
from scheduler_svc.core.events import Stats
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine_lease import EngineLease, EngineReport
from scheduler_svc.epoch import Epoch, EpochOver, start_epoch
from scheduler_svc.epoch_config import config_for, longest_step_s
from scheduler_svc.lost_gateways import GatewayWatch
from scheduler_svc.observer import Observer
from scheduler_svc.past.plans_history import PlansHistory
from scheduler_svc.progress import Progress
from scheduler_svc.recording import FileRecorder
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_failure import WorkerFailure
from scheduler_svc.worker_watch import WorkerGroup, look_at_workers
from shared.bus.api import ENTRY_BYTES, Append, Bus, Entry, EntryId
from shared.bus.ends import LogEnds
from shared.bus.keys import EngineKeys
from shared.codec import Message, decode, encode
from shared.errors import BusUnavailable, DecodeError, PageStreamError, StaleWriter
from shared.logs import EventLog
from shared.messages.endings import FinishReason
from shared.messages.leases import EngineState
from shared.messages.outputs import RequestEnded, StepResult
from shared.messages.plans import EpochStarted
from shared.messages.requests import Attach, Drain, GatewayLost
from shared.outputs_log.reader import check_output

_BLOCK_MS = 250  # an idle loop wakes this often to look after leases
_RELEASE_S = 1.5  # for requests that are sent to an engine that hands over
_HOUSEKEEPING_S = 0.5
_RETRY_S = 0.5
_LOOK_S = 0.1  # for a worker that is to come
_MAX_ENTRIES = 512
_PRESSED_SHARE = 0.75  # of Redis' memory; gateways refuse new requests a little later

log = EventLog(__name__)


class Superseded(PageStreamError):
    """Another scheduler has taken the engine over."""


class SchedulerService:
    """One engine's scheduler.

    Args:
        bus: where the logs are.
        settings: limits of a step.
        observer: logs and counts what happens.
        recorder: records everything that a replay needs; None: nothing is recorded.
        clock_s: monotonic time.
        directory: of the fleet that the engine belongs to; None: it is alone.
    """

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        observer: Observer,
        recorder: FileRecorder | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        directory: Bus | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._observer = observer
        self._recorder = recorder
        self._clock_s = clock_s
        self._epoch_since_s = 0.0
        self._keys = EngineKeys(settings.engine_id)
        self._instance = uuid4().hex
        self._stopping = asyncio.Event()
        self._draining = asyncio.Event()
        self._suspects: list[int] = []
        self._served_lives: tuple[str, ...] = ()  # of the workers of the last epoch
        self._gateways = GatewayWatch(settings.gateway_grace, clock_s)
        self._progress = Progress(clock_s)
        self._ends = LogEnds(bus)
        self._history = PlansHistory(
            self._keys, settings.plans_retention, settings.plans_retention_bytes, clock_s
        )
        self._epoch = 0  # the last one that was begun
        self._failure = WorkerFailure(settings.worker_patience, clock_s)
        self._lease = EngineLease(bus, settings, self._instance, directory)

    def stop(self) -> None:
        """Finish what runs without new admissions; at the second call, end after this tick.

        Unfinished requests stay in the log for the next start.
        """
        if self._draining.is_set() or self._settings.drain_timeout == 0:
            self._stopping.set()
        self._draining.set()

    async def run(self) -> None:
        """Serve epochs until stopped.

        Raises:
            Superseded: another scheduler is at work.
        """
        log.info("scheduler started", instance=self._instance, engine=self._settings.engine_id)
        is_loaded = False
        while not self._stopping.is_set():
            try:
                if self._draining.is_set():
                    break  # what ran has lost its worker, or Redis
                await self._bus.add_engine(self._settings.engine_id)
                if not is_loaded:
                    await self._history.load(self._bus)
                    is_loaded = True
                workers = await self._wait_for_workers()
                if workers is not None:
                    await self._serve(workers)
            except EpochOver as reason:
                pause_s = self._progress.over()
                log.warning("epoch over", reason=reason, next_in_s=pause_s)
                if pause_s:
                    await self._pause(pause_s)
            except BusUnavailable as error:
                log.warning("waiting for Redis", error=error)
                await self._pause()
            except StaleWriter as error:
                raise Superseded(str(error)) from None
        await self._publish_stop()

    # ----------------------------------------------------------------- workers

    async def _wait_for_workers(self) -> WorkerGroup | None:
        """The workers of all ranks once they are ready; None if stopped."""
        said = ""
        while not (self._stopping.is_set() or self._draining.is_set()):
            found = self._failure.judge(await look_at_workers(self._bus, self._keys))
            if found.group is not None:
                self._lease.model, self._lease.kv = found.group.model, found.group.kv
                return found.group
            if found.detail != said:
                say = log.error if found.state is EngineState.FAILED else log.info
                say("waiting for a worker", detail=found.detail)
                said = found.detail
            await self._lease.publish(EngineReport(found.state, found.detail))
            await self._pause(_LOOK_S)
        return None

    async def _pause(self, seconds: float = _RETRY_S) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    # ---------------------------------------------------------------- an epoch

    async def _serve(self, workers: WorkerGroup) -> None:
        """Plan for the workers of all ranks until one is gone."""
        config = config_for(self._settings, workers)
        # A worker that comes back under any name did not die: it was paused, or without Redis.
        # Its name may date from before a restart of Redis: then it does nothing in this epoch,
        # and the next one finds it alive.
        survived = workers.can_survive and workers.lives == self._served_lives
        suspects, self._suspects = [] if survived else self._suspects, []
        self._served_lives = workers.lives
        started = await start_epoch(
            self._bus,
            self._keys,
            config,
            self._instance,
            workers.instances,
            self._recorder,
            suspects,
            above=self._epoch,
            plans_history=self._history,
        )
        epoch, core = started.number, started.core
        self._epoch_since_s = self._clock_s()
        self._epoch = epoch
        self._progress.start(core, longest_step_s(config))
        self._observer.new_epoch(epoch, workers.kv, core)
        stalled_ms = self._progress.stalled_ms(core)
        ready = EngineReport(EngineState.READY, epoch=epoch, stalled_ms=stalled_ms)
        await self._lease.publish(ready)
        due_s = 0.0
        until_s = math.inf
        while not self._stopping.is_set() and self._clock_s() < until_s:
            await self._tick(started)
            self._progress.update(core)
            if self._draining.is_set() and not self._stopping.is_set() and until_s == math.inf:
                await self._start_draining(core, epoch)
                until_s = self._clock_s() + self._settings.drain_timeout
            if core.hands_over and not core.has_work and until_s > self._clock_s() + _RELEASE_S:
                # Gateways may have sent more before they read that the engine drains.
                until_s = self._clock_s() + _RELEASE_S
            elif core.is_draining and not core.hands_over and not core.has_running:
                break
            if self._clock_s() >= due_s:
                await self._housekeeping(started, workers)
                due_s = self._clock_s() + _HOUSEKEEPING_S
        if self._draining.is_set():
            self._stopping.set()
            log.info("drained", requests_left=core.num_requests)

    async def _tick(self, started: Epoch) -> None:
        """Read, apply, plan, append: one round trip each way."""
        core, epoch, keys = started.core, started.number, self._keys
        cursors = {keys.outputs: core.outputs_cursor}
        if not core.is_draining or core.hands_over:  # else it is for the next scheduler
            cursors[keys.requests] = core.requests_cursor
        found = await self._bus.read(cursors, _BLOCK_MS, _MAX_ENTRIES)
        if not found and not core.has_work:
            return  # otherwise a deadline may have passed
        began = time.perf_counter()
        answers: list[Message] = []
        for entry in found.get(keys.outputs, ()):
            answers += self._apply_output(core, entry)
        for entry in found.get(keys.requests, ()):
            answers += self._apply_request(started, entry)
        plans = []
        while (plan := core.schedule(self._now_ms(epoch))) is not None:
            plans.append(plan)
        answers += core.take_answers()
        spent_s = time.perf_counter() - began
        # Answers first: a request's RequestState stands in the log before its first plan.
        appends = list[Append]()
        if answers:
            earlier = started.history.trim_below(
                core.outputs_cursor, self._settings.outputs_retention, core.outputs_bytes_left
            )
            trim = core.outputs_min_id if earlier is None else earlier
            appends += started.prompts.split(answers, trim)
        num_outputs = len(appends)
        for plan in plans:
            self._observer.planned(plan)
            data = encode(plan)
            at = EntryId(epoch, plan.step)
            if self._recorder is not None:
                self._recorder.plan(at, data)
            self._history.planned(at, ENTRY_BYTES + len(data))
            trim = self._history.plans_min_id(EntryId(epoch, core.applied_step))
            appends.append(Append(keys.plans, [data], epoch, plan.step, trim))
        if appends:
            ids = await self._bus.append_all(appends)
            if answers:
                written = ids[num_outputs - 1]
                if written <= core.outputs_cursor:
                    raise EpochOver(f"{keys.outputs} has lost entries: was it deleted?")
                started.prompts.appended(written)
        self._observer.ticked(spent_s)
        self._observer.noted(core.take_events())
        if core.needs_checkpoint:
            await self._checkpoint(started)

    def _now_ms(self, epoch: int) -> int:
        """The engine's clock: Redis's time at the start of the epoch, and what has passed since."""
        return epoch + int((self._clock_s() - self._epoch_since_s) * 1e3)

    def _apply_output(self, core: Scheduler, entry: Entry) -> list[Message]:
        answers: list[Message] = []
        if self._recorder is not None:
            self._recorder.entry("outputs", entry)
        core.read_outputs(entry.id, entry.num_bytes)
        for data in entry.messages:
            try:
                message = decode(data)
                if not isinstance(message, StepResult):  # the core checks those
                    check_output(entry.id, message)
            except DecodeError as error:
                raise EpochOver(f"unreadable entry {entry.id} in outputs: {error}") from None
            if isinstance(message, EpochStarted) and message.scheduler != self._instance:
                raise Superseded(f"scheduler {message.scheduler} started epoch {message.epoch}")
            if isinstance(message, StepResult):
                self._observer.result(message)
                self._progress.stepped(message.step_us / 1e6)
            try:
                answers += core.apply(message, entry.id)
            except ProtocolError as error:
                raise EpochOver(str(error)) from None
        return answers

    def _apply_request(self, started: Epoch, entry: Entry) -> list[Message]:
        core, answers = started.core, list[Message]()
        if self._recorder is not None:
            self._recorder.entry("requests", entry)
        for data in entry.messages:
            try:
                message = decode(data)
                answers += core.apply(message, entry.id)
                if isinstance(message, Attach) and message.must_have_prompt:
                    started.prompts.leave_in(message.request_id)
            except DecodeError as error:
                log.warning("unreadable request", entry=entry.id, error=error)
                core.skip_request(entry.id)
                if error.request_id is not None:
                    reason = f"the request could not be read: {error}"
                    answers.append(
                        RequestEnded(error.request_id, FinishReason.ERROR, reason, str(entry.id))
                    )
        return answers

    # ------------------------------------------------------------ housekeeping

    async def _housekeeping(self, started: Epoch, workers: WorkerGroup) -> None:
        """Leases, gauges, and RequestStates that let the log be trimmed."""
        core, epoch = started.core, started.number
        found = await look_at_workers(self._bus, self._keys)
        if found.group is None:
            self._suspects = core.suspects()
            raise EpochOver(found.detail)
        if found.group.instances != workers.instances:
            self._suspects = core.suspects()
            raise EpochOver(f"the workers are now {', '.join(found.group.instances)}")
        await self._check_logs(started)
        stats = self._observer.gauges(core, workers.kv)
        await self._lease.publish(self._report(core, epoch, stats))
        keys = self._keys
        keys_of_logs = (keys.requests, keys.plans, keys.outputs, keys.prompts)
        lengths = {key.rpartition(":")[2]: await self._bus.length(key) for key in keys_of_logs}
        self._observer.log_lengths(lengths)
        is_pressed = await self._bus.memory_share() > _PRESSED_SHARE
        if is_pressed:
            self._history.forget_plans()
        elif snapshot := self._history.snapshot(core, epoch, self._now_ms(epoch)):
            with suppress(StaleWriter):  # a later scheduler's are there
                await self._bus.append(snapshot)
        await self._checkpoint(started, is_pressed)
        if is_pressed:
            num_dropped = await self._bus.trim(keys.outputs, core.outputs_needed_id)
            started.prompts.trim(core.outputs_needed_id)
            await self._bus.trim(keys.prompts, started.prompts.first_needed_id)
            log.warning("Redis is short of memory, outputs trimmed", entries=num_dropped)
        lost = await self._gateways.lost(self._bus, self._keys, core.gateways)
        if lost:
            await self._bus.append(
                Append(keys.requests, [encode(GatewayLost(gateway)) for gateway in lost])
            )

    async def _check_logs(self, started: Epoch) -> None:
        """End an epoch in which nothing can happen any more."""
        core, epoch, keys = started.core, started.number, self._keys
        known = {
            keys.outputs: core.outputs_cursor,
            keys.plans: EntryId(epoch, core.planned_step),
            keys.requests: core.requests_cursor,
            keys.prompts: started.prompts.last_id,
        }
        if (lost := await self._ends.lost(known)) is not None:
            raise EpochOver(f"{lost} has lost entries that were there: was it deleted?")
        if self._progress.is_stuck():
            plan = f"the plan of step {core.applied_step + 1}"
            raise EpochOver(f"{plan} has had no result for {self._progress.stalled_ms(core)} ms")

    async def _start_draining(self, core: Scheduler, epoch: int) -> None:
        """Append a Drain to the requests log, so that the core admits no further request."""
        hand_over = await self._lease.has_other_engine()
        timeout_s = self._settings.drain_timeout
        log.info("draining", timeout_s=timeout_s, hand_over=hand_over, requests=core.num_requests)
        await self._lease.publish(self._report(core, epoch))
        await self._bus.append(Append(self._keys.requests, [encode(Drain(epoch, hand_over))]))

    async def _checkpoint(self, started: Epoch, is_pressed: bool = False) -> None:
        """Restate old requests right behind what was read; in vain if a result came between."""
        core, epoch = started.core, started.number
        states = core.checkpoints(is_pressed)
        if not states:
            return
        started.prompts.trim(core.outputs_min_id)
        appends = started.prompts.split(states, seq=core.outputs_cursor.seq + 1)
        try:
            ids = await self._bus.append_all(appends)
        except StaleWriter:
            if (await self._bus.last_id(self._keys.outputs)).epoch != epoch:
                raise
            log.debug("checkpoint came too late", requests=len(states))
        else:
            started.prompts.appended(ids[-1])

    def _report(self, core: Scheduler, epoch: int, stats: Stats | None = None) -> EngineReport:
        return EngineReport(
            EngineState.READY,
            epoch=epoch,
            stats=stats,
            prefixes=core.prefixes(),
            stalled_ms=self._progress.stalled_ms(core),
            draining=self._draining.is_set(),
        )

    async def _publish_stop(self) -> None:
        try:
            stopped = EngineReport(EngineState.STARTING, "the scheduler was stopped", draining=True)
            await self._lease.publish(stopped)
        except BusUnavailable as error:
            log.warning("Redis is gone already", error=error)
        log.info("scheduler stopped")
