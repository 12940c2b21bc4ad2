"""A scheduler on the in-memory bus, a worker without a model, and a reader of the outputs log."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from scheduler_svc.observer import Observer
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import Message, decode, decode_as, encode
from shared.messages.leases import PROTOCOL, EngineInfo, KVGeometry, ModelInfo, Speeds, WorkerInfo
from shared.messages.outputs import RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.metrics import SchedulerMetrics
from tests.support.fake_worker import FakeWorker

KEYS = EngineKeys("engine-0")
DEADLINE_S = 20


class Peer:
    """A worker process and a reader of the outputs log in one."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        life: str = "",
        write: Callable[[Message], bytes] = encode,
        protocol: int = PROTOCOL,
        num_blocks: int = 32,
        max_model_len: int = 256,
        worker_type: type[FakeWorker] = FakeWorker,
        rank: int = 0,
        num_ranks: int = 1,
        group: str = "",
        prefill_tokens_per_s: float = 1e4,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.group = group
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.bus = bus
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.worker_type = worker_type
        self.instance = instance
        self.life = life
        self.write = write
        self.protocol = protocol
        self.cursor = START
        self.epoch = 0
        self.num_results = 0

    async def announce(self, state: str = "ready", detail: str = "") -> None:
        info = WorkerInfo(
            instance=self.instance,
            rank=self.rank,
            state=state,
            detail=detail,
            model=ModelInfo("demo", 1_000, self.max_model_len, "float32", (0,)),
            kv=KVGeometry(self.num_blocks, block_size=4, bytes_per_block=64, num_host_blocks=8),
            speeds=Speeds(self.prefill_tokens_per_s, swap_bytes_per_s=1e9),
            life=self.life,
            protocol=self.protocol,
            num_ranks=self.num_ranks,
            group=self.group,
        )
        await self.bus.put(KEYS.worker(self.rank), encode(info), 60_000)

    async def work(self) -> None:
        """Execute plans of the epochs that name this instance, for ever."""
        worker: FakeWorker | None = None
        while True:
            found = await self.bus.read({KEYS.plans: self.cursor}, 1_000, 10)
            for entry in found.get(KEYS.plans, ()):
                self.cursor = entry.id
                message = decode(entry.messages[0])
                if isinstance(message, EpochStarted):
                    self.epoch = message.epoch
                    named = self.instance in message.workers
                    worker = self.worker_type(4, 512, _draw) if named else None
                elif isinstance(message, StepPlan) and worker is not None:
                    assert entry.id == EntryId(self.epoch, message.step)
                    result = worker.execute(message)
                    below = EntryId.parse(message.outputs_min_id)
                    await self.bus.append(
                        Append(KEYS.outputs, [self.write(result)], self.epoch, trim_below=below)
                    )
                    self.num_results += 1
            await asyncio.sleep(0)


def _draw(handle: int, position: int) -> tuple[int, bool]:
    return (position * 3 + 1) % 997, False


class Reader:
    """Follows the outputs log and remembers everything."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.cursor = START
        self.seen: list[Message] = []

    async def until(self, condition: Callable[[list[Message]], bool]) -> list[Message]:
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.seen):
            assert time.monotonic() < deadline, f"not seen in time; last: {self.seen[-3:]}"
            found = await self.bus.read({KEYS.outputs: self.cursor}, 1_000, 100)
            for entry in found.get(KEYS.outputs, ()):
                self.cursor = entry.id
                self.seen += [decode(message) for message in entry.messages]
        return self.seen

    def tokens(self, request_id: str) -> list[int]:
        """What a client of this request has by now."""
        handle, output = 0, []
        for message in self.seen:
            if isinstance(message, RequestState) and message.submit.request_id == request_id:
                handle, output = message.choices[0].handle, message.choices[0].output.tolist()
            elif isinstance(message, StepResult):
                for row, found in enumerate(message.handles.tolist()):
                    if found == handle:
                        output.append(int(message.tokens[row]))
        return output


def service(
    bus: Bus, clock_s: Callable[[], float] = time.monotonic, **changes: object
) -> SchedulerService:
    # Peers read plans from the start of the log, and may have the name of an earlier one.
    values = {"drain_timeout": 0.0, "plans_retention": 0, **changes}
    settings = SchedulerSettings(**values)  # type: ignore[arg-type]
    observer = Observer(SchedulerMetrics("demo", "engine-0"))
    return SchedulerService(bus, settings, observer, clock_s=clock_s)


@asynccontextmanager
async def running(found: SchedulerService) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(found.run())
    try:
        yield task
    finally:
        found.stop()
        await asyncio.wait([task], timeout=DEADLINE_S)
        assert task.done(), "the service must stop when asked"


@asynccontextmanager
async def working(peer: Peer) -> AsyncIterator[None]:
    task = asyncio.create_task(peer.work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def ended(request_id: str, num_tokens: int, reader: Reader) -> Callable[[list[Message]], bool]:
    return lambda seen: len(reader.tokens(request_id)) >= num_tokens


async def info(bus: Bus) -> EngineInfo:
    data = await bus.get(KEYS.info)
    assert data is not None
    return decode_as(EngineInfo, data)
