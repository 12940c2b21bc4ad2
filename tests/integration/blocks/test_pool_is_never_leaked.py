"""Clients that come, go and lose interest at random: all blocks come back, all others finish."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Abort, Stop, Submit
from tests.support.engine import DEADLINE_S, Engine, running_engine
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.requests import submit


@pytest.fixture(params=["recompute", "swap"])
async def engine(
    redis_bus: RedisBus, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Engine]:
    worker = WorkerSettings(
        model=str(tiny_model("llama", tmp_path / "llama")),
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=4,
        num_blocks=96,
        num_host_blocks=64,
    )
    scheduler = SchedulerSettings(
        max_num_sequences=24, max_num_batched_tokens=64, preemption=request.param
    )
    async with running_engine(redis_bus, worker, scheduler) as found:
        yield found


async def test_random_aborts_and_stops_leave_nothing_behind(engine: Engine) -> None:
    rng = np.random.default_rng(11)
    submits = [
        submit(
            f"r{index}",
            rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 90))).tolist(),
            max_tokens=int(rng.integers(1, 60)),
            temperature=float(rng.choice([0.0, 0.9])),
            seed=index,
            ignore_eos=True,
        )
        for index in range(120)
    ]
    generating = asyncio.create_task(engine.generate(submits))
    left: set[str] = set()
    while not generating.done():
        victim = submits[int(rng.integers(len(submits)))]
        if rng.random() < 0.5:
            await engine.send(Abort(victim.request_id, victim.attachment, "lost interest"))
        else:
            await engine.send(Stop(victim.request_id, 0, 1))
        left.add(victim.request_id)
        # Every few results, a client leaves.
        seen = engine.num_results
        async with asyncio.timeout(DEADLINE_S):
            while engine.num_results < seen + 3 and not generating.done():
                await asyncio.sleep(0)
    answers = await generating
    for asked, answer in zip(submits, answers, strict=True):
        check_end(asked, answer.tokens, answer.finish_reason, asked.request_id in left)
    await engine.until_idle()


def check_end(asked: Submit, tokens: list[int], reason: str | None, may_be_cut: bool) -> None:
    """A request that was left alone has all its tokens."""
    if may_be_cut and reason in ("abort", "stop"):
        assert len(tokens) <= asked.sampling.max_tokens
        return
    assert reason == "length"
    assert len(tokens) == asked.sampling.max_tokens
