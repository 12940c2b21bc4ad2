"""The worker's loop on a bus: whom it obeys, and what makes it start afresh."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.lease import Lease
from gpu_worker.service import WorkerService
from shared.bus.api import START, Append, EntryId
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import decode, decode_as, encode
from shared.errors import BusUnavailable
from shared.messages.leases import KVGeometry, ModelInfo, Speeds, WorkerInfo, WorkerState
from shared.messages.outputs import StepResult
from shared.messages.plans import EpochStarted, StepPlan
from tests.gpu_worker.planner import ints, step_plan

KEYS = EngineKeys("engine-0")
MODEL = ModelInfo("tiny", 100, 64, "float32", (2,))
KV = KVGeometry(8, 16, 1024, 4)
SPEEDS = Speeds(1e3, 1e9)


class Clock:
    """The bus's clock, moved by hand."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


class FlakyBus(MemoryBus):
    """A bus whose next append can be made to fail, before or after it was carried out."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        super().__init__(clock_ms)
        self.fail: str = ""
        self.server = "first"

    async def append(self, append: Append) -> EntryId:
        fail, self.fail = self.fail, ""
        if fail == "before":
            raise BusUnavailable("connection lost")
        found = await super().append(append)
        if fail == "after":
            raise BusUnavailable("reply lost")
        return found

    async def run_id(self) -> str:
        return self.server


@dataclass
class FakeExecutor:
    """Remembers what it was asked to do."""

    steps: list[int] = field(default_factory=list)
    resets: int = 0
    refuse: bool = False
    error: Exception | None = None

    @property
    def is_held(self) -> bool:
        """Whether a step waits for the test."""
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        if self.refuse:
            raise PlanRefused("sequence 9 is unknown")
        if self.error is not None:
            raise self.error
        self.steps.append(plan.step)
        none = ints()
        return StepResult(plan.step, none, none, none, none, (), (), (), none, none, 0, 1, 2)

    def reset(self) -> None:
        self.resets += 1
        self.steps.clear()


class HeldExecutor(FakeExecutor):
    """Computes on a thread, and one of its steps lasts until it is released."""

    def __init__(self, held_step: int) -> None:
        super().__init__()
        self.began = threading.Event()
        self.release = threading.Event()
        self.resets_while_held = 0
        self.fail_once: Exception | None = None
        self._held_step = held_step

    @property
    def is_held(self) -> bool:
        return self.began.is_set() and not self.release.is_set()

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self._held_step:
            resets = self.resets
            self.began.set()
            assert self.release.wait(10)
            self.resets_while_held = self.resets - resets
            if self.fail_once is not None:
                error, self.fail_once = self.fail_once, None
                raise error
        return super().execute(plan)


class DeviceStep:
    """A step that lasts until the device is told to end it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = threading.Event()

    def wait(self) -> None:
        assert self.done.wait(10)


class Device(FakeExecutor):
    """Begins steps at once; each lasts until it is told to end."""

    def __init__(self, waiting: ThreadPoolExecutor) -> None:
        super().__init__()
        self.waiting = waiting
        self.refuse_to_begin = False
        self.begun: list[DeviceStep] = []
        self.unfinished_at_reset: list[int] = []

    def begin(self, plan: StepPlan) -> DeviceStep:
        assert len(self._unfinished()) < 2
        if self.refuse_to_begin:
            raise PlanRefused("sequence 9 is unknown")
        self.begun.append(DeviceStep(plan))
        return self.begun[-1]

    def finish(self, step: DeviceStep) -> StepResult:
        assert step.done.is_set()
        assert step.plan.step == self._unfinished()[0]
        return self.execute(step.plan)

    def reset(self) -> None:
        self.unfinished_at_reset += self._unfinished()
        super().reset()
        self.begun.clear()

    def end(self, step: int) -> None:
        self.begun[step - 1].done.set()

    def _unfinished(self) -> list[int]:
        return [step.plan.step for step in self.begun if step.plan.step not in self.steps]


class Overheads:
    """What the loop says of the time between steps."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def snapshot(self) -> None:
        pass

    def step(self, result: StepResult, snapshot: None, overhead_s: float | None) -> None:
        self.seen.append(overhead_s)


class Stage:
    """A worker at work, and the scheduler's side of the logs."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        thread: ThreadPoolExecutor | None = None,
        device: "Device | None" = None,
    ) -> None:
        self.clock = Clock()
        self.bus = FlakyBus(self.clock)
        self.executor = executor or FakeExecutor()
        self.thread = thread
        self.observer = Overheads()
        self.service = WorkerService(
            self.bus,
            "engine-0",
            self.executor,
            MODEL,
            KV,
            SPEEDS,
            self.observer,
            thread=thread,
            pipeline=device,
            waiting=None if device is None else device.waiting,
        )
        self.task = asyncio.create_task(self.service.run())

    async def until(self, found: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not found():
                await asyncio.sleep(0.001)

    async def lease(self) -> WorkerInfo | None:
        value = await self.bus.get(KEYS.worker(0))
        return None if value is None else decode_as(WorkerInfo, value)

    async def instance(self, other_than: str = "") -> str:
        """Name of the worker once it is ready."""
        async with asyncio.timeout(5):
            while True:
                lease = await self.lease()
                if (
                    lease is not None
                    and lease.state == WorkerState.READY
                    and lease.instance != other_than
                ):
                    return lease.instance
                await asyncio.sleep(0.001)

    async def start_epoch(self, epoch: int, *workers: str) -> None:
        started = encode(EpochStarted(epoch, "scheduler", workers))
        await self.bus.append_all(
            [Append(KEYS.plans, [started], epoch, 0), Append(KEYS.outputs, [started], epoch, 0)]
        )

    async def plan(self, epoch: int, step: int, outputs_min_id: str = "0-0") -> None:
        plan = step_plan(step, outputs_min_id=outputs_min_id)
        await self.bus.append(Append(KEYS.plans, [encode(plan)], epoch, step))

    async def results(self, num: int) -> list[tuple[int, int]]:
        """The first results in the log, as (epoch, step)."""
        found: list[tuple[int, int]] = []
        async with asyncio.timeout(5):
            while len(found) < num:
                await asyncio.sleep(0.001)
                found = await self.results_now()
        return found

    async def results_now(self) -> list[tuple[int, int]]:
        entries = (await self.bus.read({KEYS.outputs: START}, 0, 1000)).get(KEYS.outputs, [])
        return [
            (entry.id.epoch, message.step)
            for entry in entries
            for message in map(decode, entry.messages)
            if isinstance(message, StepResult)
        ]

    async def life(self) -> str:
        """Of the worker that holds the lease."""
        lease = await self.lease()
        assert lease is not None
        return lease.life

    async def quiet(self) -> None:
        """Return when the worker has done all that it may do: it waits, and so does its thread."""
        loop = asyncio.get_running_loop()
        num_idle = 0
        async with asyncio.timeout(5):
            while num_idle < 2:
                if self.thread is not None and not self.executor.is_held:
                    await loop.run_in_executor(self.thread, lambda: None)  # behind its work
                await asyncio.sleep(0)
                is_idle = not loop._ready  # type: ignore[attr-defined]
                num_idle = num_idle + 1 if is_idle else 0


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    stage.service.stop()
    await asyncio.wait_for(stage.task, 5)


async def test_a_ready_worker_says_what_it_serves(stage: Stage) -> None:
    await stage.instance()
    lease = await stage.lease()
    assert lease is not None
    assert (lease.model, lease.kv, lease.speeds, lease.rank) == (MODEL, KV, SPEEDS, 0)


async def test_plans_of_an_epoch_that_names_the_worker_are_executed_in_order(
    stage: Stage,
) -> None:
    await stage.start_epoch(10, await stage.instance())
    for step in (1, 2, 3):
        await stage.plan(10, step)
    assert await stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_results_trim_the_log_below_what_the_plan_says(stage: Stage) -> None:
    await stage.start_epoch(10, await stage.instance())
    await stage.plan(10, 1)
    await stage.results(1)
    await stage.plan(10, 2, outputs_min_id="10-2")
    await stage.until(lambda: stage.executor.steps == [1, 2])
    await stage.quiet()
    assert await stage.results_now() == [(10, 2)]


async def test_an_epoch_that_names_others_leaves_the_worker_idle(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, "somebody else")
    await stage.plan(10, 1)
    await stage.quiet()
    assert stage.executor.steps == []
    await stage.start_epoch(11, mine)
    await stage.plan(11, 1)
    assert await stage.results(1) == [(11, 1)]


async def test_plans_before_any_epoch_are_not_executed(stage: Stage) -> None:
    await stage.instance()
    await stage.plan(9, 1)
    await stage.quiet()
    assert stage.executor.steps == []


async def test_a_new_epoch_starts_with_an_empty_batch(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1)
    await stage.results(1)
    resets = stage.executor.resets
    await stage.start_epoch(11, mine)
    await stage.plan(11, 1)
    assert await stage.results(2) == [(10, 1), (11, 1)]
    assert stage.executor.resets > resets


async def test_a_fenced_worker_forgets_the_epoch_and_waits_to_be_named(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    # A newer epoch stands in outputs already, its entry in plans has not been read yet.
    started = encode(EpochStarted(20, "scheduler", (mine,)))
    await stage.bus.append(Append(KEYS.outputs, [started], 20, 0))
    await stage.plan(10, 1)
    await stage.plan(10, 2)
    await stage.quiet()
    assert await stage.results_now() == []
    assert stage.executor.steps == []
    await stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await stage.plan(20, 1)
    assert await stage.results(1) == [(20, 1)]
    assert await stage.instance() == mine


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_append_of_unknown_fate_makes_a_new_instance(stage: Stage, fail: str) -> None:
    mine = await stage.instance()
    life = await stage.life()
    await stage.start_epoch(10, mine)
    plan = encode(step_plan(1))
    await stage.quiet()
    stage.bus.fail = fail
    # Past the flaky append, which is to hit the worker's.
    await MemoryBus.append(stage.bus, Append(KEYS.plans, [plan], 10, 1))
    other = await stage.instance(other_than=mine)
    assert await stage.life() == life, "nothing that it computed is to blame"
    await stage.plan(10, 2)
    await stage.quiet()
    assert await stage.results_now() == ([] if fail == "before" else [(10, 1)])
    await stage.start_epoch(11, other)
    await stage.plan(11, 1)
    await stage.results(1 if fail == "before" else 2)


async def test_a_gap_in_the_steps_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1)
    await stage.plan(10, 3)
    await stage.instance(other_than=mine)
    assert await stage.results_now() == [(10, 1)]


async def test_an_unreadable_plan_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.bus.append(Append(KEYS.plans, [b"nonsense"], 10, 1))
    await stage.instance(other_than=mine)


async def test_a_plan_with_an_unreadable_id_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1, outputs_min_id="soon")
    await stage.instance(other_than=mine)
    assert await stage.results_now() == []


async def test_a_plan_that_does_not_fit_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    life = await stage.life()
    stage.executor.refuse = True
    await stage.plan(10, 1)
    await stage.instance(other_than=mine)
    assert await stage.life() != life, "what it was to compute may be to blame"


async def test_a_restarted_redis_makes_a_new_instance(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = await stage.instance()
    stage.bus.server = "second"
    monkeypatch.setattr(stage.service._lease, "_due_s", 0.0)
    await stage.start_epoch(10, "somebody else")  # wakes the loop
    await stage.instance(other_than=mine)


async def test_the_lease_is_let_go_on_the_way_out(stage: Stage) -> None:
    await stage.instance()
    stage.service.stop()
    await stage.start_epoch(10, "somebody else")  # wakes the loop
    await asyncio.wait_for(stage.task, 5)
    stage.clock.now_ms += 2
    assert await stage.lease() is None


async def test_a_step_that_fails_ends_the_loop_and_the_lease() -> None:
    stage = Stage()
    await stage.start_epoch(10, await stage.instance())
    stage.executor.error = MemoryError("no room for activations")
    await stage.plan(10, 1)
    with pytest.raises(MemoryError):
        await asyncio.wait_for(stage.task, 5)
    stage.clock.now_ms += 2
    assert await stage.lease() is None


async def test_a_later_worker_takes_over_and_the_earlier_stands_by() -> None:
    stage = Stage()
    mine = await stage.instance()
    later = Lease(stage.bus, KEYS, 0)
    await later.acquire("later", MODEL, KV, SPEEDS)
    stage.service._lease._due_s = 0.0
    await stage.start_epoch(10, "later")
    await stage.quiet()
    stage.clock.now_ms += 4_000
    lease = await stage.lease()
    assert lease is not None
    assert lease.instance == "later"
    stage.clock.now_ms += 2_000  # its lease runs out
    assert await stage.instance() != mine
    stage.service.stop()
    await stage.start_epoch(11, "later")
    await asyncio.wait_for(stage.task, 5)


async def test_states_before_ready_leave_a_living_workers_lease_alone() -> None:
    clock = Clock()
    bus = MemoryBus(clock)
    await Lease(bus, KEYS, 0).acquire("first", MODEL, KV, SPEEDS)
    second = Lease(bus, KEYS, 0)
    await second.publish_loading("second")
    assert decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"").instance == "first"
    clock.now_ms += 10_000
    await second.publish_loading("second")
    found = decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"")
    assert (found.state, found.instance) == (WorkerState.LOADING, "second")
    await second.publish_failed("second", "no such model")
    clock.now_ms += 30 * 60 * 1_000
    found = decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"")
    assert (found.state, found.detail) == (WorkerState.FAILED, "no such model")


@dataclass
class HeldStage:
    """A worker whose second step lasts, with plans up to the third."""

    stage: Stage
    executor: HeldExecutor
    instance: str

    async def hold(self) -> None:
        """Let it come to the second step."""
        for step in (1, 2, 3):
            await self.stage.plan(10, step)
        await self.stage.until(self.executor.began.is_set)


@pytest.fixture
async def held() -> AsyncIterator[HeldStage]:
    executor = HeldExecutor(held_step=2)
    with ThreadPoolExecutor(1) as thread:
        stage = Stage(executor, thread)
        instance = await stage.instance()
        await stage.start_epoch(10, instance)
        yield HeldStage(stage, executor, instance)
        executor.release.set()
        stage.service.stop()
        await asyncio.wait_for(stage.task, 5)


async def test_a_result_is_told_while_the_next_step_computes(held: HeldStage) -> None:
    await held.hold()
    assert await held.stage.results(1) == [(10, 1)]
    held.executor.release.set()
    assert await held.stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_a_worker_that_is_fenced_off_in_a_step_forgets_it_when_it_is_over(
    held: HeldStage,
) -> None:
    started = encode(EpochStarted(20, "scheduler", (held.instance,)))
    await held.stage.bus.append(Append(KEYS.outputs, [started], 20, 0))
    await held.hold()
    held.executor.release.set()
    await held.stage.quiet()
    assert await held.stage.results_now() == []
    assert held.executor.steps == []
    assert held.executor.resets_while_held == 0
    await held.stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await held.stage.plan(20, 1)
    assert await held.stage.results(1) == [(20, 1)]


async def test_an_append_that_fails_in_a_step_makes_a_new_instance_when_it_is_over(
    held: HeldStage,
) -> None:
    held.stage.bus.fail = "before"  # the result of the first step
    for step in (1, 2, 3):
        data = encode(step_plan(step))
        await MemoryBus.append(held.stage.bus, Append(KEYS.plans, [data], 10, step))
    await held.stage.until(held.executor.began.is_set)
    await held.stage.quiet()
    lease = await held.stage.lease()
    assert lease is not None
    assert lease.instance == held.instance  # the step is not over
    held.executor.release.set()
    await held.stage.instance(other_than=held.instance)
    assert await held.stage.results_now() == []
    assert held.executor.resets_while_held == 0


async def test_the_loop_says_how_long_a_plan_that_was_there_waited(held: HeldStage) -> None:
    await held.hold()
    held.executor.release.set()
    await held.stage.results(3)
    first, *others = held.stage.observer.seen
    assert first is None  # nothing was computed before
    assert all(overhead is not None and overhead >= 0 for overhead in others)


async def test_the_next_step_begins_without_the_loop(held: HeldStage) -> None:
    await held.hold()
    await held.stage.quiet()  # the third plan is there, too
    held.executor.release.set()
    deadline = time.monotonic() + 5
    while held.executor.steps != [1, 2, 3] and time.monotonic() < deadline:
        pass  # nothing is awaited: the loop does nothing
    assert held.executor.steps == [1, 2, 3]
    assert await held.stage.results(3) == [(10, 1), (10, 2), (10, 3)]


@pytest.mark.parametrize("why", ["refused", "failed"])
async def test_what_lies_behind_a_step_that_fails_is_not_carried_out(
    held: HeldStage, why: str
) -> None:
    await held.hold()
    await held.stage.quiet()  # the third plan is there, too
    held.executor.fail_once = PlanRefused("unknown") if why == "refused" else OSError("broken")
    held.executor.release.set()
    if why == "refused":
        instance = await held.stage.instance(other_than=held.instance)
        await held.stage.start_epoch(20, instance)
        await held.stage.plan(20, 1)
        assert await held.stage.results(2) == [(10, 1), (20, 1)]
        assert held.executor.steps == [1]
    else:
        with pytest.raises(OSError, match="broken"):
            await held.stage.task
        assert await held.stage.results_now() == [(10, 1)]
        assert held.executor.steps == [1]
        held.stage.task = asyncio.create_task(asyncio.sleep(0))


@dataclass
class DeviceStage:
    """A worker whose steps overlap."""

    stage: Stage
    device: Device
    instance: str

    async def begun(self, num: int) -> None:
        await self.stage.until(lambda: len(self.device.begun) == num)


@pytest.fixture
async def overlapping() -> AsyncIterator[DeviceStage]:
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as waiting:
        device = Device(waiting)
        stage = Stage(device, thread, device)
        instance = await stage.instance()
        await stage.start_epoch(10, instance)
        yield DeviceStage(stage, device, instance)
        stage.service.stop()
        while not stage.task.done():
            for step in device.begun:
                step.done.set()
            await asyncio.sleep(0.001)
        stage.task.result()


async def test_a_step_begins_while_the_device_is_busy_with_the_one_before(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    for step in (1, 2, 3):
        await stage.plan(10, step)
    await overlapping.begun(2)
    await stage.quiet()
    assert len(device.begun) == 2, "two at most"
    assert await stage.results_now() == []
    device.end(1)
    assert await stage.results(1) == [(10, 1)]
    await overlapping.begun(3)
    device.end(2)
    device.end(3)
    assert await stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_a_plan_that_comes_while_the_device_is_busy_is_begun_at_once(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    await stage.plan(10, 1)
    await overlapping.begun(1)
    await stage.quiet()
    await stage.plan(10, 2)
    await overlapping.begun(2)
    device.end(1)
    device.end(2)
    assert await stage.results(2) == [(10, 1), (10, 2)]
    assert stage.observer.seen == [None, 0.0]  # the device had nothing to wait for


async def test_without_a_next_plan_a_result_is_told_when_the_device_is_done(
    overlapping: DeviceStage,
) -> None:
    await overlapping.stage.plan(10, 1)
    await overlapping.begun(1)
    overlapping.device.end(1)
    assert await overlapping.stage.results(1) == [(10, 1)]


async def test_nothing_is_forgotten_before_the_device_is_done(overlapping: DeviceStage) -> None:
    stage, device = overlapping.stage, overlapping.device
    started = encode(EpochStarted(20, "scheduler", (overlapping.instance,)))
    await stage.plan(10, 1)
    await stage.plan(10, 2)
    await overlapping.begun(2)
    await stage.bus.append(Append(KEYS.outputs, [started], 20, 0))  # fences it off
    first, second = device.begun
    first.done.set()
    await stage.until(lambda: device.steps == [1])
    await stage.quiet()
    assert len(device.begun) == 2
    second.done.set()
    await stage.until(lambda: not device.begun)
    assert device.unfinished_at_reset == []
    assert await stage.results_now() == []
    await stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await stage.plan(20, 1)
    await overlapping.begun(1)
    device.end(1)
    assert await stage.results(1) == [(20, 1)]


async def test_a_refused_plan_ends_the_instance_when_the_step_before_is_told(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    await stage.plan(10, 1)
    await overlapping.begun(1)
    device.refuse_to_begin = True
    await stage.plan(10, 2)
    device.end(1)
    assert await stage.results(1) == [(10, 1)]
    await stage.instance(other_than=overlapping.instance)
    assert device.unfinished_at_reset == []
