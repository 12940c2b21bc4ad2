"""A worker's loop on an in-memory bus, with executors that compute nothing."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.ranks.member import ALONE, Member
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
    """A bus whose next append can be made to fail, before or after it was carried out.

    While ``is_down`` is set, keys cannot be read either.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        super().__init__(clock_ms)
        self.fail: str = ""
        self.is_down = False
        self.num_refused = 0  # reads while it was down
        self.server = "first"

    async def append(self, append: Append) -> EntryId:
        fail, self.fail = self.fail, ""
        if fail == "before":
            raise BusUnavailable("connection lost")
        found = await super().append(append)
        if fail == "after":
            raise BusUnavailable("reply lost")
        return found

    async def get(self, key: str) -> bytes | None:
        if self.is_down:
            self.num_refused += 1
            raise BusUnavailable("connection refused")
        return await super().get(key)

    async def run_id(self) -> str:
        return self.server


@dataclass
class FakeExecutor:
    """Records the plans that it gets."""

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
    """Computes on a thread; one of its steps lasts until the test releases it."""

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
    """A step that lasts until the test ends it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = threading.Event()

    def wait(self) -> None:
        assert self.done.wait(10)


class Device(FakeExecutor):
    """Begins steps at once; each lasts until the test ends it."""

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
    """Records the overheads that the loop measures between steps."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def snapshot(self) -> None:
        pass

    def step(self, result: StepResult, snapshot: None, overhead_s: float | None) -> None:
        self.seen.append(overhead_s)


class Stage:
    """A running worker, and the scheduler's side of the logs."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        thread: ThreadPoolExecutor | None = None,
        device: "Device | None" = None,
        member: Member = ALONE,
    ) -> None:
        self.member = member
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
            member,
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
        value = await self.bus.get(KEYS.worker(self.member.rank))
        return None if value is None else decode_as(WorkerInfo, value)

    async def instance(self, other_than: str = "") -> str:
        """Instance of the worker once it is ready."""
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
        """Life of the worker that holds the lease."""
        lease = await self.lease()
        assert lease is not None
        return lease.life

    async def quiet(self) -> None:
        """Wait until the worker and its thread have done all their work and wait."""
        loop = asyncio.get_running_loop()
        num_idle = 0
        async with asyncio.timeout(5):
            while num_idle < 2:
                if self.thread is not None and not self.executor.is_held:
                    await loop.run_in_executor(self.thread, lambda: None)  # behind its work
                await asyncio.sleep(0)
                is_idle = not loop._ready  # type: ignore[attr-defined]
                num_idle = num_idle + 1 if is_idle else 0
