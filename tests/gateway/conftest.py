"""A real gateway on a real port, with a bus in memory and an engine that tests play."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gateway.http.server import Server
from gateway.models.model_files import ModelFiles
from gateway.models.served_model import ServedModel
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from shared.bus.api import Bus
from shared.bus.memory import MemoryBus
from shared.model_name import model_name
from tests.gateway.fake_engine import FakeEngine, Reply

DEMO_MODEL = str(Path(__file__).parents[2] / "models" / "demo")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL, trust_remote_code=False)


@dataclass
class Stage:
    """Everything on the stage of one test."""

    server: Server
    engine: FakeEngine
    tokenizer: Tokenizer
    url: str
    http: httpx.AsyncClient
    running: "asyncio.Task[int]"
    openai: AsyncOpenAI
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)

    @property
    def model(self) -> ServedModel:
        """The only one."""
        [found] = self.server.service.models.served
        return found

    def answer(self, reply: Reply, **kwargs: Any) -> None:
        """Answer every request in the background."""
        self.spawn(self.engine.serve(reply, **kwargs))

    def answer_text(self, text: str, **kwargs: Any) -> None:
        """Answer every request with a text."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        self.answer(lambda _: tokens, **kwargs)

    def spawn(self, work: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self.tasks.append(task)
        return task

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.http.post(
            "/v1/completions", json={"model": "demo", "prompt": "Hello", **body}
        )

    async def chat(self, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        messages = [{"role": "user", "content": "Hello"}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": "demo", "messages": messages, **body}
        )

    async def until(self, what: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Wait for something that nothing announces."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.002)


MakeStage = Callable[..., Awaitable[Stage]]


@asynccontextmanager
async def _open_stage(
    tokenizer: Tokenizer, bus: Bus, ready: bool, defaults: Mapping[str, Any], **changes: Any
) -> Any:
    settings = GatewaySettings(**{"model": DEMO_MODEL, "port": 0, **changes})
    engine = FakeEngine(bus)
    await engine.start_epoch()
    if ready:
        await engine.publish()
    name = model_name(settings.model, settings.served_model_name)
    files = ModelFiles.of(name, DEMO_MODEL, tokenizer, settings, defaults)
    server = Server(settings, bus, files)
    running = asyncio.ensure_future(server.run())
    url = f"http://127.0.0.1:{await server.listening()}"
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with openai, httpx.AsyncClient(base_url=url, timeout=20) as http:
        stage = Stage(server, engine, tokenizer, url, http, running, openai)
        if ready:
            await stage.until(lambda: server.service.why_not_ready() is None)
        yield stage
        for task in stage.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    server.stop()
    await running


@pytest.fixture
async def make_stage(tokenizer: Tokenizer) -> AsyncIterator[MakeStage]:
    """Opens stages with settings of their own."""
    async with AsyncExitStack() as stack:

        async def make(
            bus: Bus | None = None,
            ready: bool = True,
            tokenizer: Tokenizer = tokenizer,
            defaults: Mapping[str, Any] = MappingProxyType({}),
            **changes: Any,
        ) -> Stage:
            bus = bus or MemoryBus(lambda: time.time_ns() // 1_000_000)
            stage: Stage = await stack.enter_async_context(
                _open_stage(tokenizer, bus, ready, defaults, **changes)
            )
            return stage

        yield make


@pytest.fixture
async def stage(make_stage: MakeStage) -> Stage:
    """A gateway whose engine is ready."""
    return await make_stage()


def events(response_text: str) -> list[str]:
    """The data of every Server-Sent Event."""
    blocks = response_text.split("\n\n")
    assert blocks.pop() == "", "a stream ends after an event"
    assert all(block.startswith("data: ") for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"].partition("[")[0].partition(".")[0] == param, error
        assert param in error["message"]
    return error
