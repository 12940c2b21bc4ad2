"""Several engines behind one gateway: requests are routed, and go on elsewhere when theirs ends.

Schedulers, workers' loops and the gateway's fleet are real; each engine has a bus of its own. A
worker's tokens follow from the tokens before them, so a text is the same wherever it is computed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from zlib import crc32

import msgpack
import pytest

from gateway.engine.client import EngineClient
from gateway.engine.event_queue import EventQueue, ServerStopping
from gateway.engine.events import (
    Attached,
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
from shared.metrics import GatewayMetrics, SchedulerMetrics
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
        metrics = GatewayMetrics("demo", "fleet")

        def client(bus: Bus, engine_id: str, on_released: Callable[[str], None]) -> EngineClient:
            return EngineClient(
                bus, engine_id, "demo", instance, metrics, (), 30.0, None, on_released
            )

        fleet = Fleet(
            Directory(self.directory),
            "demo",
            instance,
            metrics,
            lambda url: self.engines[url].bus,
            client,
            patience_s,
            engine_patience_s=1.0,
        )
        self.tasks.append(asyncio.ensure_future(fleet.run()))
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


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.005)


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
            await until(lambda fleet=fleet: len(fleet._members.ready()) == len(names))
        yield stage
    finally:
        for task in stage.tasks:
            task.cancel()
        await asyncio.gather(*stage.tasks, return_exceptions=True)
        for engine in stage.engines.values():
            await engine.lose()


def engine_of(fleet: Fleet, one: Stream) -> str:
    return fleet.route_of(one.submit.request_id).partition(";")[0]


async def test_requests_with_a_common_beginning_share_an_engine_and_others_are_spread() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        first = stream(0, list(range(1, 200)), max_tokens=2)
        await fleet.submit([first.submit], first.queue)
        await first.follow()
        again = stream(1, list(range(1, 230)), max_tokens=2)
        await fleet.submit([again.submit], again.queue)
        route = fleet.route_of(again.submit.request_id)
        assert "reason=prefix" in route
        assert "expected_tokens=192" in route
        assert engine_of(fleet, again) == engine_of(fleet, first)
        await again.follow()
        others = [stream(number, [number * 7] * 40) for number in range(2, 10)]
        for one in others:
            await fleet.submit([one.submit], one.queue)
        assert {engine_of(fleet, one) for one in others} == {"a", "b"}


async def test_streams_of_an_engine_that_drains_go_on_in_others_token_for_token() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(12)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        mine = [one for one in streams if engine_of(fleet, one) == "a"]
        await asyncio.gather(*(one.follow(least=20) for one in streams))
        late = stream(99)
        await asyncio.gather(
            stage.engines["a"].drain(),
            fleet.submit([late.submit], late.queue),
            *(one.follow() for one in streams),
        )
        await late.follow()
        assert mine, "some were there"
        for one in [*streams, late]:
            assert (one.error, one.reason) == ("", "length")
            assert one.tokens == text_after(one.prompt, LONG)
        assert all(engine_of(fleet, one) == "b" for one in mine)
        assert fleet._metrics.moved_requests["released"]._value.get() >= len(mine)


async def test_streams_of_an_engine_that_is_lost_go_on_in_others_token_for_token() -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(8)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        await asyncio.gather(*(one.follow(least=20) for one in streams))
        await stage.engines["b"].lose()
        await asyncio.gather(*(one.follow() for one in streams))
        for one in streams:
            assert (one.error, one.reason) == ("", "length")
            assert one.tokens == text_after(one.prompt, LONG)
        assert fleet._metrics.moved_requests["lost"]._value.get() > 0


async def test_a_stream_that_was_moved_can_be_resumed_at_another_gateway() -> None:
    async with fleet_of("a", "b", num_gateways=2) as stage:
        first, second = stage.gateways
        one = stream(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        await stage.engines[engine_of(first, one)].drain()
        await one.follow(least=len(one.tokens) + 5)
        found = Stream(one.submit)
        second.look_up(one.submit.request_id, found.queue)
        async with asyncio.timeout(DEADLINE_S):
            [attached] = await found.queue.take()
        assert isinstance(attached, Attached)
        tokens = list(attached.outputs[0])
        assert tokens == text_after(one.prompt, len(tokens))
        unknown = stream(7)
        second.look_up(unknown.submit.request_id, unknown.queue)
        await unknown.follow()
        assert unknown.error == "unknown"


async def test_an_engine_that_joins_takes_load() -> None:
    async with fleet_of("a") as stage:
        [fleet] = stage.gateways
        streams = [stream(number) for number in range(4)]
        for one in streams:
            await fleet.submit([one.submit], one.queue)
        await stage.add_engine("b")
        await until(lambda: len(fleet._members.ready()) == 2)
        late = [stream(number) for number in range(4, 8)]
        for one in late:
            await fleet.submit([one.submit], one.queue)
        assert "b" in {engine_of(fleet, one) for one in late}
        await asyncio.gather(*(one.follow() for one in [*streams, *late]))
        assert all(one.reason == "length" for one in [*streams, *late])


async def test_the_only_engine_finishes_what_runs_before_it_stops() -> None:
    async with fleet_of("a") as stage:
        [fleet] = stage.gateways
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        await asyncio.gather(stage.engines["a"].drain(), one.follow())
        assert one.tokens == text_after(one.prompt, LONG)
        assert fleet._metrics.moved_requests["released"]._value.get() == 0


async def test_without_another_engine_a_lost_stream_ends_with_an_error() -> None:
    stage = Stage(memory_bus())
    await stage.add_engine("a")
    fleet = await stage.add_gateway(patience_s=0.5)
    try:
        await until(lambda: fleet._members.ready())
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        await stage.engines["a"].lose()
        await one.follow()
        assert "no other could go on with it" in one.error
        assert one.tokens == text_after(one.prompt, len(one.tokens))
    finally:
        for task in stage.tasks:
            task.cancel()
        await asyncio.gather(*stage.tasks, return_exceptions=True)


async def test_a_gateway_that_stops_ends_calls_whose_requests_are_at_no_engine() -> None:
    async with fleet_of() as stage:
        [fleet] = stage.gateways
        one = stream(0)
        fleet.attach(one.submit, one.queue)
        fleet.leave()
        async with asyncio.timeout(DEADLINE_S):
            assert ServerStopping() in await one.queue.take()


@pytest.mark.parametrize("ends", ["closed", "aborted"])
async def test_a_call_that_ends_while_its_request_is_moved_leaves_nothing(ends: str) -> None:
    async with fleet_of("a", "b") as stage:
        [fleet] = stage.gateways
        one = stream(0)
        await fleet.submit([one.submit], one.queue)
        await one.follow(least=10)
        source = engine_of(fleet, one)
        draining = asyncio.ensure_future(stage.engines[source].drain())
        await until(lambda: one.submit.request_id in fleet._between or draining.done())
        if ends == "closed":
            fleet.close(one.submit.request_id, one.queue)
        else:
            fleet.abort(one.submit.request_id, one.queue, "gone")
        await draining
        assert fleet.num_open == 0
        assert not fleet._engine_of


def resumable(number: int) -> Stream:
    """A stream whose client can come back by its URL."""
    display = msgpack.packb({"resumable": True})
    return Stream(replace(stream(number).submit, display=display))


async def looked_up(fleet: Fleet, one: Stream) -> list[int]:
    """What a gateway that has only the id gets of a request."""
    found = Stream(one.submit)
    fleet.look_up(one.submit.request_id, found.queue)
    async with asyncio.timeout(DEADLINE_S):
        [attached] = await found.queue.take()
    assert isinstance(attached, Attached), attached
    assert attached.submit.prompt.tolist() == one.prompt
    fleet.attach(attached.submit, found.queue, ())
    await found.follow()
    assert (found.error, found.reason) == ("", "length")
    return found.tokens


@pytest.mark.parametrize("ends", ["released", "empty"])
async def test_a_stream_whose_gateway_and_engine_end_together_goes_on_elsewhere(ends: str) -> None:
    async with fleet_of("a", "b", num_gateways=2) as stage:
        first, second = stage.gateways
        one = resumable(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        source = engine_of(first, one)
        stage.tasks[0].cancel()
        await asyncio.gather(stage.tasks[0], return_exceptions=True)
        if ends == "released":
            await stage.engines[source].drain()
        else:  # it is lost, and back with a Redis that has nothing
            await stage.engines[source].lose()
            await until(lambda: second._members.by_id[source].engine is None)
            stage.engines[source].bus._logs.clear()
            stage.engines[source] = await stage.add_engine(source, stage.engines[source].bus)
            await until(lambda: second._members.by_id[source].engine is not None)
        assert await looked_up(second, one) == text_after(one.prompt, LONG)


async def test_a_stream_that_was_aborted_is_not_begun_again() -> None:
    async with fleet_of("a", "b", num_gateways=2, patience_s=0.5) as stage:
        first, second = stage.gateways
        one = resumable(0)
        await first.submit([one.submit], one.queue)
        await one.follow(least=20)
        source = engine_of(first, one)
        first.abort(one.submit.request_id, one.queue, "gone")
        await until(lambda: not first._tasks)
        await stage.engines[source].lose()
        await until(lambda: second._members.by_id[source].engine is None)
        found = Stream(one.submit)
        second.look_up(one.submit.request_id, found.queue)
        await found.follow()
        assert found.error
        assert not found.tokens
