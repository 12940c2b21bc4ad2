"""The scheduler's loop on the in-memory bus, with a rule-abiding worker that has no model."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgpack
import pytest

from scheduler_svc.observer import Observer
from scheduler_svc.service import SchedulerService, Superseded
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import START, Append, Bus, Entry, EntryId
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import Message, decode, decode_as, encode
from shared.errors import BusUnavailable
from shared.messages.leases import PROTOCOL, EngineInfo, KVGeometry, ModelInfo, Speeds, WorkerInfo
from shared.messages.outputs import RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Abort, Attach
from shared.metrics import SchedulerMetrics
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

KEYS = EngineKeys("engine-0")
DEADLINE_S = 20


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(lambda: time.time_ns() // 1_000_000)


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
    ) -> None:
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
            rank=0,
            state=state,
            detail=detail,
            model=ModelInfo("demo", 1_000, self.max_model_len, "float32", (0,)),
            kv=KVGeometry(self.num_blocks, block_size=4, bytes_per_block=64, num_host_blocks=8),
            speeds=Speeds(prefill_tokens_per_s=1e4, swap_bytes_per_s=1e9),
            life=self.life,
            protocol=self.protocol,
        )
        await self.bus.put(KEYS.worker(0), encode(info), 60_000)

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
                    named = message.workers == (self.instance,)
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
    settings = SchedulerSettings(**{"drain_timeout": 0.0, **changes})  # type: ignore[arg-type]
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


async def test_a_request_is_accepted_planned_and_finished(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9), max_tokens=20))]))
        await reader.until(ended("a", 20, reader))
    assert reader.tokens("a") == [position * 3 + 1 for position in range(9, 29)]
    info = decode_as(EngineInfo, await bus.get(KEYS.info) or b"")
    assert info.detail == "the scheduler was stopped"


@pytest.mark.parametrize(("pause_s", "largest"), [(0.0, 100), (0.002, 20), (0.0001, 16)])
async def test_prompts_lengthen_the_steps_of_others_by_no_more_than_a_pause(
    bus: MemoryBus, pause_s: float, largest: int
) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)  # which computes 10,000 tokens of prompts a second
    await peer.announce()
    async with running(service(bus, prefill_pause=pause_s)), working(peer):
        first = submit("first", range(5), max_tokens=120)
        await bus.append(Append(KEYS.requests, [encode(first)]))
        await reader.until(ended("first", 3, reader))
        late = submit("late", range(100, 200), max_tokens=2)
        await bus.append(Append(KEYS.requests, [encode(late)]))
        await reader.until(ended("late", 2, reader))
        await reader.until(ended("first", 120, reader))
    results = [message for message in reader.seen if isinstance(message, StepResult)]
    # One more row is the first request's.
    assert max(result.num_batched_tokens for result in results) in (largest, largest + 1)


async def state_of_engine(bus: MemoryBus, patience_s: float, *states: str) -> EngineInfo:
    """What the scheduler publishes while the worker's lease goes through these states."""
    now_s = 0.0
    found = service(bus, lambda: now_s, worker_patience=patience_s)
    worker = Peer(bus, "w1")
    await worker.announce(states[0], "no such folder")
    async with running(found):
        for state in states:
            await worker.announce(state, "no such folder" if state == "failed" else "")
            await bus.put(KEYS.info, b"", 1)
            deadline = time.monotonic() + DEADLINE_S
            while not (value := await bus.get(KEYS.info)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0)
            now_s += 10.0
        return decode_as(EngineInfo, value)


@pytest.mark.parametrize(
    ("patience_s", "states", "state", "detail"),
    [
        (0, ["failed"], "failed", "no such folder"),
        (5, ["failed"], "starting", "the worker cannot start: no such folder"),
        (15, ["failed", "loading"], "starting", "the worker cannot start: no such folder"),
        (15, ["failed", "loading", "failed"], "failed", "no such folder"),
        (15, ["failed", "ready", "loading"], "starting", "no worker is ready"),
        (15, ["failed", "ready", "loading", "failed"], "starting", "cannot start: no such folder"),
    ],
)
async def test_an_engine_has_failed_when_its_workers_could_not_start_for_a_while(
    bus: MemoryBus, patience_s: float, states: list[str], state: str, detail: str
) -> None:
    info = await state_of_engine(bus, patience_s, *states)
    assert info.state == state
    assert info.detail.endswith(detail)


async def test_a_worker_whose_results_have_a_field_more_is_worked_with(bus: MemoryBus) -> None:
    def newer(message: Message) -> bytes:
        packed: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), "newer": [1]})
        return packed

    peer, reader = Peer(bus, "w1", write=newer), Reader(bus)
    await peer.announce()
    async with running(service(bus)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9), max_tokens=20))]))
        await reader.until(ended("a", 20, reader))
    assert sum(isinstance(message, EpochStarted) for message in reader.seen) == 1


async def test_a_worker_of_another_protocol_is_refused_until_one_of_this_comes(
    bus: MemoryBus,
) -> None:
    await Peer(bus, "w1", protocol=PROTOCOL + 1).announce()
    peer, reader = Peer(bus, "w2"), Reader(bus)
    async with running(service(bus, worker_patience=0)):
        while await bus.get(KEYS.info) is None:
            await asyncio.sleep(0)
        found = await info(bus)
        assert (found.state, found.epoch) == ("failed", 0)
        assert f"the worker speaks protocol {PROTOCOL + 1}" in found.detail
        await peer.announce()
        async with working(peer):
            await bus.append(Append(KEYS.requests, [encode(submit("a", range(9)))]))
            await reader.until(ended("a", 16, reader))


async def test_epochs_without_results_are_no_progress() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    peer = Peer(bus, "w1", write=lambda _: b"\xff")  # what it writes cannot be read
    await peer.announce()
    async with running(service(bus, clock_s=lambda: now_s)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9)))]))
        stalled_ms: dict[int, int] = {}  # by epoch, at its start
        while len(stalled_ms) < 4:
            if await bus.get(KEYS.info) is not None and (found := await info(bus)).epoch:
                now_s += 5 * (found.epoch not in stalled_ms)
                stalled_ms.setdefault(found.epoch, found.stalled_ms)
            await asyncio.sleep(0)
    assert [*stalled_ms.values()][1:] == [5_000, 10_000, 15_000]


class CountingBus(MemoryBus):
    """Counts the turns of a scheduler."""

    num_turns = 0

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        self.num_turns += KEYS.requests in cursors
        return await super().read(cursors, block_ms, max_entries)


async def test_an_engine_that_was_idle_has_not_stalled_when_work_comes() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    async with running(service(bus, clock_s=lambda: now_s)):
        await Peer(bus, "w1").announce()  # and does nothing
        while await bus.get(KEYS.info) is None or (await info(bus)).state != "ready":
            await asyncio.sleep(0)
        now_s += 60
        before = bus.num_turns
        while bus.num_turns < before + 2:
            await asyncio.sleep(0)

        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)
        now_s += 1
        while (await info(bus)).num_running == 0:
            await asyncio.sleep(0)
        assert (await info(bus)).stalled_ms == 1_000


async def test_a_plan_without_a_result_leads_to_a_new_epoch_later_each_time() -> None:
    bus, now_s = CountingBus(lambda: time.time_ns() // 1_000_000), 100.0
    reader = Reader(bus)

    def started(count: int) -> Callable[[list[Message]], bool]:
        return lambda seen: sum(isinstance(found, EpochStarted) for found in seen) >= count

    async def is_planned_anew() -> int:
        """The epoch, as soon as there is a plan in it that nobody carries out."""
        epoch = (await bus.last_id(KEYS.outputs)).epoch
        while await bus.last_id(KEYS.plans) < EntryId(epoch, 1):
            await asyncio.sleep(0)
        return epoch

    async def turns() -> None:
        before = bus.num_turns
        while bus.num_turns < before + 3:
            await asyncio.sleep(0)

    async with running(service(bus, clock_s=lambda: now_s)):
        await Peer(bus, "w1").announce()  # and does nothing
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        await reader.until(started(1))
        first = await is_planned_anew()
        now_s += 9.0
        await turns()
        assert (await bus.last_id(KEYS.outputs)).epoch == first
        now_s += 9.0
        await reader.until(started(2))
        second = await is_planned_anew()
        now_s += 18.0
        await turns()
        assert (await bus.last_id(KEYS.outputs)).epoch == second
        now_s += 18.0
        await reader.until(started(3))


class AbsentBus(MemoryBus):
    """A server that does not answer."""

    num_asked = 0

    async def add_engine(self, engine_id: str) -> None:
        self.num_asked += 1
        raise BusUnavailable("connection refused")


async def test_a_scheduler_that_waits_for_redis_ends_when_asked() -> None:
    bus = AbsentBus(lambda: time.time_ns() // 1_000_000)
    found = service(bus, drain_timeout=30.0)
    task = asyncio.create_task(found.run())
    while bus.num_asked == 0:
        await asyncio.sleep(0)
    found.stop()
    await asyncio.wait_for(task, DEADLINE_S)


async def test_a_new_worker_continues_where_the_dead_one_stopped(bus: MemoryBus) -> None:
    first, second, reader = Peer(bus, "w1"), Peer(bus, "w2"), Reader(bus)
    await first.announce()
    async with running(service(bus)):
        async with working(first):
            await bus.append(Append(KEYS.requests, [encode(submit("a", range(5), max_tokens=90))]))
            await reader.until(ended("a", 10, reader))
        await second.announce()
        async with working(second):
            await reader.until(ended("a", 90, reader))
    assert reader.tokens("a") == [position * 3 + 1 for position in range(5, 95)]
    assert sum(isinstance(message, EpochStarted) for message in reader.seen) == 2


async def test_a_new_scheduler_continues_what_the_old_one_accepted(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with working(peer):
        async with running(service(bus)):
            for name in ("a", "b"):
                asked = submit(name, range(5), max_tokens=100)
                await bus.append(Append(KEYS.requests, [encode(asked)]))
            await reader.until(ended("b", 10, reader))
        late = submit("late", range(3), max_tokens=5)
        await bus.append(Append(KEYS.requests, [encode(late)]))
        async with running(service(bus)):
            for name, count in (("a", 100), ("b", 100), ("late", 5)):
                await reader.until(ended(name, count, reader))
    for name in ("a", "b"):
        assert reader.tokens(name) == [position * 3 + 1 for position in range(5, 105)]


async def test_the_log_stays_short_though_no_epoch_lives_as_long_as_it_should_remember(
    bus: MemoryBus,
) -> None:
    retention, num_tokens, lengths = 100, 40, []
    for number in range(8):
        peer, reader, name = Peer(bus, f"w{number}"), Reader(bus), f"r{number}"
        await peer.announce()
        async with running(service(bus, outputs_retention=retention)), working(peer):
            request = submit(name, range(5), max_tokens=num_tokens)
            await bus.append(Append(KEYS.requests, [encode(request)]))
            await reader.until(ended(name, num_tokens, reader))
        lengths.append(await bus.length(KEYS.outputs))
    assert lengths[1] > num_tokens, "an epoch leaves what is recent"
    assert max(lengths) <= retention + 2 * num_tokens, lengths


async def test_the_log_stays_small_though_results_are_large_and_many_requests_wait(
    bus: MemoryBus,
) -> None:
    limit = 1 << 20

    def large(message: Message) -> bytes:
        packed: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), "scores": b"x" * 40_000})
        return packed

    peer, reader, sizes = Peer(bus, "w1", write=large), Reader(bus), []
    await peer.announce()
    async with (
        running(service(bus, outputs_retention_bytes=limit, max_num_sequences=1)),
        working(peer),
    ):
        long = submit("long", range(5), max_tokens=110)
        waiting = [submit(f"w{number}", range(40), max_tokens=1) for number in range(150)]
        await bus.append(Append(KEYS.requests, [encode(found) for found in (long, *waiting)]))
        for num_tokens in range(10, 101, 10):
            await reader.until(ended("long", num_tokens, reader))
            entries = (await bus.read({KEYS.outputs: START}, 0, 10_000))[KEYS.outputs]
            sizes.append(sum(entry.num_bytes for entry in entries))
        assert 40_000 * peer.num_results > 3 * limit
    assert max(sizes) < 1.3 * limit, sizes
    later = Reader(bus)
    later.cursor = await bus.last_id(KEYS.outputs)
    async with running(service(bus)):
        wanted = {found.request_id for found in (long, *waiting)}
        await later.until(lambda seen: wanted == set(map(stated, seen)) - {""})


def stated(message: Message) -> str:
    """The request that a message is the state of."""
    return message.submit.request_id if isinstance(message, RequestState) else ""


async def test_the_log_stays_short_though_nothing_is_computed(bus: MemoryBus) -> None:
    async with running(service(bus, outputs_retention=100)):
        await Peer(bus, "w1").announce()
        reader = Reader(bus)
        for number in range(300):
            unknown = Attach(f"r{number}", "gateway", "attachment", None, (), exact=False)
            await bus.append(Append(KEYS.requests, [encode(unknown)]))
            await reader.until(
                lambda seen: (
                    isinstance(seen[-1], RequestEnded) and seen[-1].request_id == f"r{number}"  # noqa: B023
                    if seen
                    else False
                )
            )
        assert await bus.length(KEYS.outputs) <= 102


class PressedBus(MemoryBus):
    """A server that has used so much of its memory."""

    share = 0.0
    num_looks = 0

    async def memory_share(self) -> float:
        self.num_looks += 1
        return self.share

    async def looked_at(self, times: int) -> None:
        """Return when the memory was looked at so often from now on."""
        until = self.num_looks + times
        deadline = time.monotonic() + DEADLINE_S
        while self.num_looks < until:
            assert time.monotonic() < deadline, "the scheduler does not look at Redis' memory"
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("share", "most"), [(0.75, 200), (0.76, 66)])
async def test_where_redis_is_short_of_memory_outputs_keep_what_recovery_needs_and_no_more(
    share: float, most: int
) -> None:
    bus = PressedBus(lambda: time.time_ns() // 1_000_000)
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus)):
        early = submit("early", range(5), max_tokens=20)
        await bus.append(Append(KEYS.requests, [encode(early)]))
        for number in range(150):
            unknown = Attach(f"r{number}", "gateway", "attachment", None, (), exact=False)
            await bus.append(Append(KEYS.requests, [encode(unknown)]))
            await reader.until(lambda seen: answers_to(f"r{number}", seen))  # noqa: B023
        bus.share = share
        await bus.looked_at(4)  # a fresh state, what is in front of it trimmed
        length = await bus.length(KEYS.outputs)
        assert most - 66 < length <= most, length
    async with running(service(bus)), working(peer):
        await reader.until(ended("early", 20, reader))
    assert reader.tokens("early") == [position * 3 + 1 for position in range(5, 25)]


def answers_to(request_id: str, seen: list[Message]) -> bool:
    """The last message is the end of this request."""
    last = seen[-1] if seen else None
    return isinstance(last, RequestEnded) and last.request_id == request_id


class RestartedBus(MemoryBus):
    """A server that can be restarted without losing anything."""

    breaks = False

    async def read(
        self, cursors: Mapping[str, EntryId], block_ms: int, max_entries: int
    ) -> dict[str, list[Entry]]:
        if self.breaks and KEYS.requests in cursors:  # the scheduler's
            self.breaks = False
            raise BusUnavailable("connection closed by server")
        return await super().read(cursors, block_ms, max_entries)


async def test_a_restart_of_redis_is_not_taken_for_the_death_of_a_worker() -> None:
    bus = RestartedBus(lambda: time.time_ns() // 1_000_000)
    async with running(service(bus)):
        await Peer(bus, "w1", "life").announce()  # and does nothing: the plans are in flight
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        reader = Reader(bus)
        await reader.until(lambda seen: any(isinstance(m, RequestState) for m in seen))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)

        bus.breaks = True
        # Its lease still stands, under the name that it will give up.
        await reader.until(lambda seen: named(seen) == ["w1", "w1"])
        await Peer(bus, "w2", "life").announce()

        seen = await reader.until(lambda seen: "w2" in named(seen))
    assert named(seen) == ["w1", "w1", "w2"]
    assert [m.suspects.tolist() for m in seen if isinstance(m, EpochStarted)] == [[], [], []]


@pytest.mark.parametrize(
    ("lives", "are_suspect"), [(("one", "one"), False), (("one", "two"), True), (("", ""), True)]
)
async def test_only_a_worker_that_does_not_come_back_makes_requests_suspect(
    bus: MemoryBus, lives: tuple[str, str], are_suspect: bool
) -> None:
    async with running(service(bus)):
        await Peer(bus, "w1", lives[0]).announce()  # and does nothing: the plans are in flight
        await bus.append(Append(KEYS.requests, [encode(submit("r1", [1, 2, 3]))]))
        reader = Reader(bus)
        await reader.until(lambda seen: any(isinstance(m, RequestState) for m in seen))
        while await bus.length(KEYS.plans) < 2:
            await asyncio.sleep(0)

        await Peer(bus, "w2", lives[1]).announce()
        seen = await reader.until(lambda seen: "w2" in named(seen))
    epochs = [message for message in seen if isinstance(message, EpochStarted)]
    assert [len(epoch.suspects) > 0 for epoch in epochs] == [False, are_suspect]


async def info(bus: Bus) -> EngineInfo:
    data = await bus.get(KEYS.info)
    assert data is not None
    return decode_as(EngineInfo, data)


def named(seen: list[Message]) -> list[str]:
    """The worker of each epoch."""
    return [message.workers[0] for message in seen if isinstance(message, EpochStarted)]


async def test_a_scheduler_that_reads_anothers_epoch_exits(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    first, second = service(bus), service(bus)
    async with running(first) as old:
        await reader.until(lambda seen: len(seen) == 1)
        async with running(second):
            with pytest.raises(Superseded):
                await asyncio.wait_for(asyncio.shield(old), DEADLINE_S)


async def test_an_abort_ends_the_request_unless_it_is_stale(bus: MemoryBus) -> None:
    await Peer(bus, "w1").announce()
    reader = Reader(bus)
    async with running(service(bus)):
        await bus.append(Append(KEYS.requests, [encode(submit("a"))]))
        await bus.append(Append(KEYS.requests, [encode(Abort("a", "an older one", "gone"))]))
        await bus.append(Append(KEYS.requests, [encode(submit("b"))]))
        await bus.append(Append(KEYS.requests, [encode(Abort("b", "attachment", "gone"))]))
        seen = await reader.until(lambda seen: any(isinstance(m, RequestEnded) for m in seen))
    endings = [message for message in seen if isinstance(message, RequestEnded)]
    assert [(ending.request_id, ending.reason) for ending in endings] == [("b", "abort")]


async def test_a_request_that_cannot_be_read_is_answered(bus: MemoryBus) -> None:
    await Peer(bus, "w1").announce()
    reader = Reader(bus)
    broken = encode(submit("broken")).replace(b"prompt", b"tpmorp")
    async with running(service(bus)):
        await bus.append(Append(KEYS.requests, [b"\xff\xffnot msgpack"]))
        await bus.append(Append(KEYS.requests, [broken]))
        seen = await reader.until(lambda seen: any(isinstance(m, RequestEnded) for m in seen))
    [ending] = [message for message in seen if isinstance(message, RequestEnded)]
    assert (ending.request_id, ending.reason) == ("broken", "error")
    assert "prompt" in ending.error


async def test_the_logs_stay_short_while_a_long_request_lives(bus: MemoryBus) -> None:
    peer, reader = Peer(bus, "w1"), Reader(bus)
    await peer.announce()
    async with running(service(bus, outputs_retention=100)), working(peer):
        await bus.append(Append(KEYS.requests, [encode(submit("long", [1], max_tokens=120))]))
        for number in range(30):
            asked = submit(f"r{number}", range(3), max_tokens=90)
            await bus.append(Append(KEYS.requests, [encode(asked)]))
        for number in range(30):
            await reader.until(ended(f"r{number}", 90, reader))
        assert peer.num_results > 150
        assert await bus.length(KEYS.plans) <= 4
        deadline = time.monotonic() + DEADLINE_S
        number = 30
        while await bus.length(KEYS.outputs) > 150:
            assert time.monotonic() < deadline, await bus.length(KEYS.outputs)
            asked = submit(f"r{number}", range(3), max_tokens=50)
            await bus.append(Append(KEYS.requests, [encode(asked)]))
            await reader.until(ended(f"r{number}", 50, reader))
            number += 1
    assert reader.tokens("long") == [position * 3 + 1 for position in range(1, 121)]
