"""The models of a gateway's fleet follow the leases in a directory; engines are leases alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import pytest

from gateway.engine.client import EngineClient
from gateway.fleet.directory import Directory, Placement
from gateway.fleet.fleet import Fleet
from gateway.http.errors import ApiError
from gateway.models.file_loader import FileLoader
from gateway.models.fleet_models import FleetModels
from gateway.models.model_files import ModelFiles
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from shared.bus.keys import engine_lease, placement
from shared.bus.memory import MemoryBus
from shared.codec import encode
from shared.errors import ModelUnsupported
from shared.messages.leases import ModelInfo
from shared.metrics import GatewayMetrics, ModelMetrics
from tests.gateway.fake_engine import INFO

DEADLINE_S = 20.0


@dataclass
class Stage:
    """A table, its directory, and a clock that stands still."""

    tokenizer: Tokenizer
    settings: GatewaySettings
    directory: MemoryBus = field(default_factory=lambda: MemoryBus(lambda: 0))
    now_s: float = 1_000.0
    broken: dict[str, Exception] = field(default_factory=dict)  # by root
    may_read: Event = field(default_factory=Event)
    read_roots: list[str] = field(default_factory=list)
    metrics: GatewayMetrics = field(default_factory=lambda: GatewayMetrics("", "engine-0"))

    def __post_init__(self) -> None:
        self.may_read.set()
        clock = lambda: self.now_s  # noqa: E731
        loader = FileLoader(self.settings, self.read, clock)
        directory = Directory(self.directory)

        def fleet(files: ModelFiles, metrics: ModelMetrics) -> Fleet:
            def client(bus: Any, engine_id: str, on_released: Any) -> EngineClient:
                return EngineClient(bus, engine_id, files.name, "gateway", metrics, (), 30.0)

            connect = lambda _url, _engine_id: MemoryBus(lambda: 0)  # noqa: E731
            return Fleet(
                *(directory, files.name, metrics, connect, client),
                retention_s=self.settings.model_retention,
                clock_s=clock,
            )

        self.table = FleetModels(directory, self.settings, self.metrics, fleet, loader, clock)

    def read(self, name: str, root: str) -> ModelFiles:
        self.read_roots.append(root)
        assert self.may_read.wait(DEADLINE_S)
        if root in self.broken:
            raise self.broken[root]
        return ModelFiles.of(name, root, self.tokenizer, self.settings)

    async def join(self, engine_id: str, model: str, root: str | None = None) -> None:
        """Write the lease of an engine."""
        root = f"/models/{model}" if root is None else root
        info = ModelInfo(model, 4_096, 2_048, "float32", (1,), root=root)
        lease = replace(INFO, engine_id=engine_id, model=info, redis_url=engine_id)
        await self.directory.add_engine(engine_id)
        await self.directory.put(engine_lease(engine_id), encode(lease), 5_000)

    async def leave(self, engine_id: str) -> None:
        await self.directory.delete(engine_lease(engine_id))

    async def until(self, done: Callable[[], bool]) -> None:
        """Read the directory until something is the case."""
        async with asyncio.timeout(DEADLINE_S):
            await self.table._poll()
            while not done():
                await asyncio.sleep(0.001)
                await self.table._poll()

    async def until_served(self, *names: str) -> None:
        await self.until(lambda: [model.name for model in self.table.served] == list(names))

    def refusal(self, name: str) -> tuple[int, str]:
        with pytest.raises(ApiError) as caught:
            self.table.named(name)
        return caught.value.status, str(caught.value)


@asynccontextmanager
async def staged(tokenizer: Tokenizer, **changes: Any) -> AsyncIterator[Stage]:
    stage = Stage(tokenizer, GatewaySettings(**changes))
    yield stage
    stage.may_read.set()
    running = asyncio.ensure_future(stage.table.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    stage.table.close()


async def test_a_model_is_a_503_until_its_files_are_read_and_others_are_served_meanwhile(
    tokenizer: Tokenizer,
) -> None:
    async with staged(tokenizer) as stage:
        assert stage.refusal("a") == (503, "the directory of engines was not read yet")
        await stage.join("one", "a")
        await stage.until_served("a")
        assert stage.refusal("b")[0] == 404
        stage.may_read.clear()
        await stage.join("two", "b")
        await stage.until(lambda: "/models/b" in stage.read_roots)
        assert stage.refusal("b") == (503, "the files of the model 'b' are being read")
        assert stage.table.named("a").root == "/models/a"
        stage.may_read.set()
        await stage.until_served("a", "b")
        assert stage.read_roots == ["/models/a", "/models/b"]


@pytest.mark.parametrize("error", [ModelUnsupported("no tokenizer for /models/b"), OSError("/b")])
async def test_files_that_cannot_be_read_are_a_503_with_the_reason_and_read_again_later(
    tokenizer: Tokenizer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tokenizer) as stage:
        stage.broken["/models/b"] = error
        await stage.join("one", "a")
        await stage.join("two", "b")
        with caplog.at_level("ERROR", "gateway.models.file_loader"):
            await stage.until(lambda: str(error) in (stage.table.why_away("b") or ""))
        assert [record.getMessage() for record in caplog.records] == ["model not served"]
        assert stage.refusal("b")[0] == 503
        await stage.until_served("a")
        assert stage.read_roots.count("/models/b") == 1
        del stage.broken["/models/b"]
        stage.now_s += 31
        await stage.until_served("a", "b")


async def test_a_model_without_an_engine_stays_for_the_retention_time(tokenizer: Tokenizer) -> None:
    async with staged(tokenizer, model_retention=100.0) as stage:
        await stage.join("one", "a")
        await stage.until_served("a")
        model = stage.table.named("a")
        await stage.directory.put(placement("r"), Placement("one").encode(), 5_000)
        assert await stage.table.owner("r") is model
        await stage.leave("one")
        stage.now_s += 99
        await stage.until_served("a")
        assert model.why_not_ready() is not None
        stage.now_s += 2
        await stage.until_served()
        assert stage.refusal("a") == (404, "The model 'a' does not exist; served here: no model")
        assert await stage.table.owner("r") is None, "its engine was away for so long"
        assert b'model_name="a"' in stage.metrics.render()
        stage.now_s += 61
        await stage.until(lambda: b'model_name="a"' not in stage.metrics.render())


async def test_the_number_of_models_is_limited_and_one_without_an_engine_makes_room(
    tokenizer: Tokenizer,
) -> None:
    async with staged(tokenizer, max_models=2) as stage:
        await stage.join("one", "a")
        await stage.join("two", "b")
        await stage.until_served("a", "b")
        await stage.join("three", "c")
        await stage.until(lambda: stage.table.why_away("c") is not None)
        assert stage.refusal("c") == (503, "the model 'c' is one too many: --max-models=2")
        await stage.leave("one")
        await stage.until_served("b", "c")


async def test_a_request_at_an_engine_that_was_not_seen_yet_is_a_503(tokenizer: Tokenizer) -> None:
    async with staged(tokenizer, model_retention=100.0) as stage:
        await stage.directory.put(placement("r"), Placement("away").encode(), 5_000)
        await stage.until_served()
        with pytest.raises(ApiError) as caught:
            await stage.table.owner("r")
        assert (caught.value.status, str(caught.value)) == (503, "its engine, 'away', is away")
        assert await stage.table.owner("unknown") is None
        stage.now_s += 101
        assert await stage.table.owner("r") is None


async def test_a_gateways_own_files_of_a_model_come_first_and_those_of_its_engines_next(
    tokenizer: Tokenizer,
) -> None:
    async with staged(tokenizer, model="/mine/b") as stage:
        stage.broken = {root: ModelUnsupported(root) for root in ("/mine/b", "/one/b")}
        await stage.join("one", "b", "/one/b")
        await stage.join("two", "b", "/two/b")
        await stage.join("three", "b", "/one/b")
        await stage.until_served("b")
        assert stage.read_roots == ["/mine/b", "/one/b", "/two/b"]
        await stage.join("old", "c", root="")
        await stage.until(lambda: "do not name its files" in (stage.table.why_away("c") or ""))
