"""The scheduler's loop: logs in, plans out, one epoch after the other."""

import asyncio
import time
from uuid import uuid4

from scheduler_svc.core.config import ProtocolError, SchedulerConfig
from scheduler_svc.core.notes import Stats
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.epoch import start_epoch
from scheduler_svc.observer import Observer
from scheduler_svc.recording import NoRecorder, Recorder
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Append, Bus, Entry, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import Message, decode, decode_as, encode
from shared.errors import BusUnavailable, DecodeError, PageStreamError, StaleWriter
from shared.logs import EventLog
from shared.messages import (
    EngineInfo,
    EngineState,
    EpochStarted,
    FinishReason,
    KVGeometry,
    ModelInfo,
    PrefixStatus,
    RequestEnded,
    StepResult,
    WorkerInfo,
    WorkerState,
)

_BLOCK_MS = 250  # an idle loop wakes this often to look after leases
_LEASE_MS = 5_000
_HOUSEKEEPING_S = 0.5
_RETRY_S = 0.5
_MAX_ENTRIES = 512

log = EventLog(__name__)


class Superseded(PageStreamError):
    """Another scheduler has taken the engine over."""


class EpochOver(PageStreamError):
    """This epoch cannot go on; a new one can."""


class SchedulerService:
    """One engine's scheduler.

    Args:
        bus: where the logs are.
        settings: limits of a step.
        observer: gets everything worth counting.
        recorder: gets everything that a replay needs.
    """

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        observer: Observer,
        recorder: Recorder | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._observer = observer
        self._recorder = recorder or NoRecorder()
        self._keys = EngineKeys(settings.engine_id)
        self._instance = uuid4().hex
        self._stopping = asyncio.Event()
        self._model: ModelInfo | None = None
        self._kv: KVGeometry | None = None

    def stop(self) -> None:
        """End after this turn; unfinished requests stay in the log for the next start."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve epochs until stopped.

        Raises:
            Superseded: another scheduler is at work.
        """
        log.info("scheduler started", instance=self._instance, engine=self._settings.engine_id)
        while not self._stopping.is_set():
            try:
                await self._bus.add_engine(self._settings.engine_id)
                worker = await self._wait_for_worker()
                if worker is not None:
                    await self._serve(worker)
            except EpochOver as reason:
                log.warning("epoch over", reason=reason)
            except BusUnavailable as error:
                log.warning("waiting for Redis", error=error)
                await self._pause()
            except StaleWriter as error:
                raise Superseded(str(error)) from None
        await self._say_goodbye()

    # ---------------------------------------------------------------- a worker

    async def _wait_for_worker(self) -> WorkerInfo | None:
        """The worker's lease once it is ready; None if stopped."""
        said = ""
        while not self._stopping.is_set():
            worker = await self._worker()
            if worker is not None and worker.state == WorkerState.READY:
                self._model, self._kv = worker.model, worker.kv
                return worker
            failed = worker is not None and worker.state == WorkerState.FAILED
            detail = worker.detail if worker is not None and failed else "no worker is ready"
            if detail != said:
                log.info("waiting for a worker", detail=detail)
                said = detail
            state = EngineState.FAILED if failed else EngineState.STARTING
            await self._publish(state, detail, epoch=0)
            await self._pause()
        return None

    async def _worker(self) -> WorkerInfo | None:
        value = await self._bus.get(self._keys.worker(0))
        if value is None:
            return None
        try:
            found: WorkerInfo = decode_as(WorkerInfo, value)
        except DecodeError as error:
            log.warning("unreadable lease of the worker", error=error)
            return None
        return found

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), _RETRY_S)
        except TimeoutError:
            return

    # ---------------------------------------------------------------- an epoch

    async def _serve(self, worker: WorkerInfo) -> None:
        """Plan for one worker until it is gone."""
        config = self._config(worker)
        epoch, core = await start_epoch(
            self._bus, self._keys, config, self._instance, (worker.instance,), self._recorder
        )
        assert worker.kv is not None
        self._observer.new_epoch(epoch, worker.kv)
        await self._publish(EngineState.READY, "", epoch)
        due_s = 0.0
        while not self._stopping.is_set():
            await self._turn(core, epoch)
            if time.monotonic() >= due_s:
                await self._housekeeping(core, epoch, worker)
                due_s = time.monotonic() + _HOUSEKEEPING_S

    def _config(self, worker: WorkerInfo) -> SchedulerConfig:
        assert worker.model is not None, "a ready worker says what it serves"
        assert worker.kv is not None, "a ready worker says how large its pool is"
        settings = self._settings
        return SchedulerConfig(
            num_blocks=worker.kv.num_blocks,
            block_size=worker.kv.block_size,
            max_model_len=worker.model.max_model_len,
            max_num_sequences=settings.max_num_sequences,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_plans_in_flight=settings.max_plans_in_flight,
            num_watermark_blocks=int(settings.watermark * worker.kv.num_blocks),
            outputs_retention=settings.outputs_retention,
            prefix_caching=settings.prefix_caching,
            num_host_blocks=worker.kv.num_host_blocks,
            preemption=settings.preemption,
            max_pinned_blocks=int(settings.max_pinned_share * worker.kv.num_blocks),
            **_costs(worker),
        )

    async def _turn(self, core: Scheduler, epoch: int) -> None:
        """Read, apply, plan, append: one round trip each way."""
        keys = self._keys
        found = await self._bus.read(
            {keys.outputs: core.outputs_cursor, keys.requests: core.requests_cursor},
            _BLOCK_MS,
            _MAX_ENTRIES,
        )
        if not found:
            return
        began = time.perf_counter()
        answers: list[Message] = []
        for entry in found.get(keys.outputs, ()):
            self._recorder.entry("outputs", entry)
            answers += self._apply_output(core, entry)
        for entry in found.get(keys.requests, ()):
            self._recorder.entry("requests", entry)
            answers += self._apply_request(core, entry)
        plans = []
        while (plan := core.schedule(time.time_ns() // 1_000_000)) is not None:
            plans.append(plan)
        spent_s = time.perf_counter() - began
        # Answers first: a request's RequestState stands in the log before its first plan.
        appends = []
        if answers:
            appends.append(Append(keys.outputs, [encode(answer) for answer in answers], epoch))
        for plan in plans:
            self._observer.planned(plan)
            data = encode(plan)
            self._recorder.plan(EntryId(epoch, plan.step), data)
            trim = EntryId(epoch, core.applied_step)
            appends.append(Append(keys.plans, [data], epoch, plan.step, trim))
        if appends:
            await self._bus.append_all(appends)
        self._observer.turn(spent_s)
        self._observer.noted(core.take_notes())

    def _apply_output(self, core: Scheduler, entry: Entry) -> list[Message]:
        answers: list[Message] = []
        for data in entry.messages:
            try:
                message = decode(data)
            except DecodeError as error:
                raise EpochOver(f"unreadable entry {entry.id} in outputs: {error}") from None
            if isinstance(message, EpochStarted) and message.scheduler != self._instance:
                raise Superseded(f"scheduler {message.scheduler} started epoch {message.epoch}")
            if isinstance(message, StepResult):
                self._observer.result(message)
            try:
                answers += core.apply(message, entry.id)
            except ProtocolError as error:
                raise EpochOver(str(error)) from None
        return answers

    def _apply_request(self, core: Scheduler, entry: Entry) -> list[Message]:
        answers: list[Message] = []
        for data in entry.messages:
            try:
                answers += core.apply(decode(data), entry.id)
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

    async def _housekeeping(self, core: Scheduler, epoch: int, worker: WorkerInfo) -> None:
        """Leases, gauges, and RequestStates that let the log be trimmed."""
        lease = await self._worker()
        if lease is None:
            raise EpochOver("the worker's lease has run out")
        if lease.instance != worker.instance or lease.state != WorkerState.READY:
            raise EpochOver(f"the worker is {lease.state}, instance {lease.instance}")
        assert worker.kv is not None
        stats = self._observer.gauges(core, worker.kv)
        await self._publish(EngineState.READY, "", epoch, stats, core.prefixes())
        keys = self._keys
        self._observer.log_lengths(
            {
                "requests": await self._bus.length(keys.requests),
                "plans": await self._bus.length(keys.plans),
                "outputs": await self._bus.length(keys.outputs),
            }
        )
        await self._checkpoint(core, epoch)

    async def _checkpoint(self, core: Scheduler, epoch: int) -> None:
        """Restate old requests right behind what was read; in vain if a result came between."""
        states = core.checkpoints()
        if not states:
            return
        data = [encode(state) for state in states]
        at = core.outputs_cursor.seq + 1
        try:
            await self._bus.append(Append(self._keys.outputs, data, epoch, at))
        except StaleWriter:
            if (await self._bus.last_id(self._keys.outputs)).epoch != epoch:
                raise
            log.debug("checkpoint came too late", requests=len(states))

    async def _publish(
        self,
        state: EngineState,
        detail: str,
        epoch: int,
        stats: Stats | None = None,
        prefixes: tuple[PrefixStatus, ...] = (),
    ) -> None:
        info = EngineInfo(
            engine_id=self._settings.engine_id,
            scheduler=self._instance,
            epoch=epoch,
            state=state,
            detail=detail,
            model=self._model,
            kv=self._kv,
            max_num_sequences=self._settings.max_num_sequences,
            num_running=0 if stats is None else stats.num_running,
            num_waiting=0 if stats is None else stats.num_waiting,
            prefixes=prefixes,
        )
        await self._bus.put(self._keys.info, encode(info), _LEASE_MS)

    async def _say_goodbye(self) -> None:
        try:
            await self._publish(EngineState.STARTING, "the scheduler was stopped", epoch=0)
        except BusUnavailable as error:
            log.warning("Redis is gone already", error=error)
        log.info("scheduler stopped")


def _costs(worker: WorkerInfo) -> dict[str, float]:
    """What preemption costs on this worker, as the core's configuration wants it."""
    if worker.speeds is None or worker.kv is None:
        return {}
    return {
        "recompute_us_per_token": 1e6 / worker.speeds.prefill_tokens_per_s,
        "swap_us_per_block": 1e6 * worker.kv.bytes_per_block / worker.speeds.swap_bytes_per_s,
    }
