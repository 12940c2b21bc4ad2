"""Several engines and gateways in one process, for tests of fleets.

Schedulers, workers' loops and the gateway's fleet are real; each engine has a bus of its own. A
worker's tokens follow from the tokens before them, so a text is the same wherever it is computed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from zlib import crc32

from gateway.engine.client import EngineClient
from gateway.engine.event_queue import EventQueue
from gateway.engine.events import (
    ChoiceFinished,
    EngineUnreachable,
    RequestFailed,
    TokensArrived,
    UnknownRequest,
)
from gateway.fleet.directory import Directory
from gateway.fleet.fleet import Fleet
from gpu_worker.service import WorkerService
from scheduler_svc.observer import Observer
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Bus
from shared.bus.memory import MemoryBus
from shared.messages.leases import KVGeometry, ModelInfo, Speeds
from shared.messages.requests import Submit
from shared.metrics import ModelMetrics, SchedulerMetrics
from tests.simulation.deployment.model import BLOCK_SIZE, Model, ModelExecutor
from tests.simulation.deployment.processes import Silent
from tests.support.requests import submit

MODEL = ModelInfo("demo", 10_000, 4_096, "float32", (0,))
DEADLINE_S = 60
LONG = 400  # generated tokens


def drawn_after(before: tuple[int, ...]) -> int:
    return 1 + crc32(repr(before).encode()) % 9_000


def text_after(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(drawn_after(tuple(tokens)))
    return tokens[len(prompt) :]


class FixedModel(Model):
    """Draws tokens that depend on those before them alone."""

    def __init__(self) -> None:
        super().__init__(Random(1), 0.0)

    def draw(self, before: tuple[int, ...]) -> tuple[int, bool]:
        return drawn_after(before), False


class SlowExecutor(ModelExecutor):
    """Steps take a while, so that something can happen between them."""

    def execute(self, plan):  # type: ignore[no-untyped-def]
        time.sleep(0.001)
        return super().execute(plan)


def memory_bus() -> MemoryBus:
    """Leases expire in a third of their time."""
    return MemoryBus(lambda: int(3e3 * time.time()))


@dataclass
class RunningEngine:
    """One engine's processes, as tasks."""

    scheduler: SchedulerService
    bus: MemoryBus
    tasks: list["asyncio.Task[None]"]

    async def lose(self) -> None:
        """Kill all processes."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def drain(self) -> None:
        """What SIGTERM does to a scheduler."""
        self.scheduler.stop()
        await self.tasks[0]


@dataclass
class Stage:
    """A fleet's engines, and its gateways."""

    directory: MemoryBus
    engines: dict[str, RunningEngine] = field(default_factory=dict)
    gateways: list[Fleet] = field(default_factory=list)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def add_engine(self, name: str, bus: MemoryBus | None = None) -> RunningEngine:
        bus = bus or memory_bus()
        settings = SchedulerSettings(
            engine_id=name,
            redis_url=name,
            directory_url="directory",
            max_num_sequences=64,
            drain_timeout=20.0,
        )
        kv = KVGeometry(2_000, BLOCK_SIZE, 64, 0)
        observer = Observer(SchedulerMetrics("demo", name))
        scheduler = SchedulerService(bus, settings, observer, directory=self.directory)
        executor = SlowExecutor(FixedModel(), settings.max_num_batched_tokens)
        speeds = Speeds(prefill_tokens_per_s=1e5, swap_bytes_per_s=1e9)
        worker = WorkerService(bus, name, executor, MODEL, kv, speeds, Silent())
        work = (scheduler.run(), worker.run())
        engine = RunningEngine(scheduler, bus, [asyncio.ensure_future(one) for one in work])
        self.engines[name] = engine
        return engine

    async def add_gateway(self, patience_s: float = 20.0) -> Fleet:
        instance = f"gateway-{len(self.gateways)}"
        metrics = ModelMetrics("demo", "fleet")

        def client(bus: Bus, engine_id: str, on_released: Callable[[str], None]) -> EngineClient:
            return EngineClient(
                bus, engine_id, "demo", instance, metrics, (), 30.0, None, on_released
            )

        directory = Directory(self.directory)
        connect = lambda url, engine_id: self.engines[url].bus  # noqa: E731
        fleet = Fleet(
            *(directory, "demo", metrics, connect, client, patience_s), engine_patience_s=1.0
        )
        self.tasks.append(asyncio.ensure_future(follow(directory, fleet)))
        self.gateways.append(fleet)
        return fleet


@dataclass
class Stream:
    """A request, and what its client got of it."""

    submit: Submit
    queue: EventQueue = field(default_factory=EventQueue)
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    error: str = ""

    @property
    def prompt(self) -> list[int]:
        found: list[int] = self.submit.prompt.tolist()
        return found

    async def follow(self, least: int | None = None) -> None:
        """Take events until the end, or until there are so many tokens."""
        async with asyncio.timeout(DEADLINE_S):
            while not (self.reason or self.error):
                if least is not None and len(self.tokens) >= least:
                    return
                for event in await self.queue.take():
                    match event:
                        case TokensArrived():
                            self.tokens += event.tokens
                        case ChoiceFinished():
                            self.reason = event.reason
                        case EngineUnreachable():
                            self.error = event.why
                        case RequestFailed():
                            self.error = event.error
                        case UnknownRequest():
                            self.error = "unknown"


def stream(number: int, prompt: list[int] | None = None, max_tokens: int = LONG) -> Stream:
    prompt = prompt or [number + 1, 2, 3]
    return Stream(submit(f"{number:032x}", prompt, max_tokens=max_tokens, ignore_eos=True))


async def follow(directory: Directory, fleet: Fleet) -> None:
    """Read the directory for a gateway's fleet until cancelled."""
    try:
        while True:
            await fleet.renew(0.0)
            await fleet.update(await directory.engines())
            await asyncio.sleep(0.1)
    finally:
        await fleet.end()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.005)


def _has_all(fleet: Fleet, num_engines: int) -> bool:
    return len(fleet._members.ready()) == num_engines


@asynccontextmanager
async def fleet_of(
    *names: str, num_gateways: int = 1, patience_s: float = 20.0
) -> AsyncIterator[Stage]:
    stage = Stage(memory_bus())
    try:
        for name in names:
            await stage.add_engine(name)
        for _ in range(num_gateways):
            fleet = await stage.add_gateway(patience_s)
            await until(partial(_has_all, fleet, len(names)))
        yield stage
    finally:
        for task in stage.tasks:
            task.cancel()
        await asyncio.gather(*stage.tasks, return_exceptions=True)
        for engine in stage.engines.values():
            await engine.lose()


def engine_of(fleet: Fleet, one: Stream) -> str:
    return fleet.route_of(one.submit.request_id).partition(";")[0]
