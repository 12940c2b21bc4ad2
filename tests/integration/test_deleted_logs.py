"""Logs are deleted under load: every stream goes on, with the tokens that it would have had."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.engine.client import EngineClient
from gateway.engine.engine_status import Engine
from gateway.engine.event_queue import EventQueue
from gateway.engine.events import ChoiceFinished, EngineUnreachable, RequestFailed, TokensArrived
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from shared.metrics import ModelMetrics
from shared.tasks import cancel_until_done
from tests.integration.configurations import Configuration
from tests.support.engine import running_scheduler, running_worker
from tests.support.requests import submit

_DEADLINE_S = 60


class Streams:
    """Requests of one gateway, and what came of each."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def generate(
        self, submits: Sequence[Submit], delete: Sequence[str] = (), bus: RedisBus | None = None
    ) -> dict[str, list[int]]:
        """Tokens by request; when the first have come, keys are deleted."""
        queue = EventQueue()
        tokens: dict[str, list[int]] = {found.request_id: [] for found in submits}
        left = set(tokens)
        named = [replace(found, gateway=self._client.instance) for found in submits]
        await self._client.submit(named, queue)
        async with asyncio.timeout(_DEADLINE_S):
            while left:
                for event in await queue.take():
                    assert not isinstance(event, (RequestFailed, EngineUnreachable)), event
                    if isinstance(event, TokensArrived):
                        tokens[event.request_id] += event.tokens
                    elif isinstance(event, ChoiceFinished):
                        self._client.close(event.request_id, queue)
                        left.discard(event.request_id)
                if bus is not None and delete and any(map(len, tokens.values())):
                    await bus._execute(delete[-1], *delete)
                    delete = ()
        assert not delete, "all had ended before anything was deleted"
        return tokens


@asynccontextmanager
async def following(bus: RedisBus, engine_id: str, model: str) -> AsyncIterator[Streams]:
    client = EngineClient(bus, engine_id, model, "gateway", ModelMetrics(model, engine_id))
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(_DEADLINE_S):
        while not isinstance(client.status, Engine):
            await asyncio.sleep(0.01)
    yield Streams(client)
    await cancel_until_done(running)


def requests(name: str) -> list[Submit]:
    return [
        submit(f"{name}-{number}", range(5 + number, 12 + number), max_tokens=100, ignore_eos=True)
        for number in range(6)
    ]


async def test_streams_survive_whatever_is_deleted(
    llama: Path, redis_bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.engine.deliveries._STATELESS_S", 1.0)
    configuration = Configuration()
    scheduler = configuration.scheduler()
    keys = EngineKeys(scheduler.engine_id)
    async with (
        running_worker(redis_bus, configuration.worker(llama), scheduler.engine_id),
        running_scheduler(redis_bus, scheduler),
        following(redis_bus, scheduler.engine_id, llama.name) as streams,
    ):
        expected = await streams.generate(requests("undisturbed"))
        for delete in (
            ("DEL", keys.outputs),
            ("DEL", keys.plans),
            ("DEL", keys.requests),
            ("FLUSHALL",),
        ):
            found = await streams.generate(requests(delete[-1]), delete, redis_bus)
            assert list(found.values()) == list(expected.values()), delete
