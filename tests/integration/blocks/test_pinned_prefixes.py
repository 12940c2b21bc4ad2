"""What the operator pins is never computed for a client, whatever others do to the cache."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from gateway.engine.client import EngineClient
from gateway.pins.pin_requests import Prefix
from shared.bus.api import Bus
from shared.bus.redis_bus import RedisBus
from shared.messages.leases import PrefixState
from shared.messages.requests import Submit
from shared.metrics import ModelMetrics
from tests.integration.configurations import Configuration, serve
from tests.support.engine import DEADLINE_S, Engine, running_scheduler, running_worker
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

BLOCK_SIZE = 16
SMALL = Configuration(BLOCK_SIZE, pool_tokens=512)
RNG_SEED = 12
PREFIX = np.random.default_rng(RNG_SEED).integers(3, VOCAB_SIZE, 100).astype(np.int32)
NUM_PINNED = 100 // BLOCK_SIZE * BLOCK_SIZE


def asking(request_id: str) -> Submit:
    tail = np.random.default_rng(1).integers(3, VOCAB_SIZE, 9).tolist()
    return submit(request_id, PREFIX.tolist() + tail, temperature=0.8, seed=5)


def flood(name: str) -> list[Submit]:
    """Twenty times what the pool holds, no two beginning alike."""
    rng = np.random.default_rng(RNG_SEED + 1)
    prompts = [rng.integers(3, VOCAB_SIZE, 200).tolist() for _ in range(50)]
    return [submit(f"{name}-{n}", prompt, max_tokens=4) for n, prompt in enumerate(prompts)]


@asynccontextmanager
async def gateway(
    bus: Bus, engine_id: str, model: str, prefix: Prefix
) -> AsyncIterator[EngineClient]:
    """The part of a gateway that speaks with the engine."""
    metrics = ModelMetrics(model, engine_id)
    client = EngineClient(bus, engine_id, model, "gateway", metrics, [prefix])
    running = asyncio.create_task(client.run())
    yield client
    running.cancel()
    await asyncio.wait([running])


async def until_pinned(client: EngineClient, engine: Engine) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while engine.metrics.pinned_blocks._value.get() < NUM_PINNED // BLOCK_SIZE:
            await asyncio.sleep(0.01)
        while client.pinning.state_of(client.pinning.prefixes[0]) != PrefixState.PINNED:
            await asyncio.sleep(0.01)


async def test_a_pinned_prefix_survives_floods_and_restarts(
    llama: Path, redis_bus: RedisBus
) -> None:
    (alone,) = (await serve(redis_bus, llama, SMALL, [asking("alone")])).answers
    scheduler = SMALL.scheduler()
    worker = replace(SMALL.worker(llama), served_model_name="tiny")
    prefix = Prefix("instructions", PREFIX, "")
    async with (
        running_worker(redis_bus, worker, scheduler.engine_id),
        gateway(redis_bus, scheduler.engine_id, "tiny", prefix) as client,
    ):
        engine: Engine | None = None
        for start in ("first", "second"):
            async with running_scheduler(redis_bus, scheduler) as metrics:
                engine = engine or Engine(redis_bus, scheduler.engine_id, metrics)
                engine.metrics = metrics
                await until_pinned(client, engine)
                answers = await engine.generate([asking(f"{start}, before")])
                await engine.generate(flood(start))
                answers += await engine.generate([asking(f"{start}, after")])
                await engine.until_idle()
                assert metrics.pinned_blocks._value.get() == NUM_PINNED // BLOCK_SIZE
                assert metrics.prefixes_given_up._value.get() == 0
            assert [answer.num_cached for answer in answers] == [[NUM_PINNED], [NUM_PINNED]]
            assert [answer.tokens for answer in answers] == [alone.tokens] * 2


async def test_without_a_pin_the_flood_leaves_nothing(llama: Path, redis_bus: RedisBus) -> None:
    rounds = [[asking("before")], flood("flood"), [asking("after")]]
    served = await serve(redis_bus, llama, SMALL, *rounds)
    assert served.answers[-1].num_cached == [0]
