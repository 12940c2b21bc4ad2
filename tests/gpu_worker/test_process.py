"""``python -m gpu_worker`` on a real Redis: its life, its end, its exit codes."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from gpu_worker.process import EXIT_HOPELESS
from shared.bus.api import START, Append
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.codec import decode, decode_as, encode
from shared.messages.leases import WorkerInfo, WorkerState
from shared.messages.outputs import StepResult
from shared.messages.plans import EpochStarted
from tests.gpu_worker.conftest import ModelPath
from tests.gpu_worker.planner import step_plan

ROOT = Path(__file__).parents[2]
KEYS = EngineKeys("engine-0")


def start(redis_url: str, *flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_worker", "--worker-metrics-port", "0", *flags],
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": redis_url},
        stderr=subprocess.PIPE,
        text=True,
    )


async def lease(bus: RedisBus) -> WorkerInfo | None:
    value = await bus.get(KEYS.worker(0))
    return None if value is None else decode_as(WorkerInfo, value)


async def test_serves_an_epoch_and_leaves_on_sigterm(
    redis_url: str, redis_bus: RedisBus, model_path: ModelPath
) -> None:
    path = str(model_path("llama"))
    flags = ("--num-blocks", "8", "--num-host-blocks", "5", "--num-threads", "1")
    process = start(redis_url, "--model", path, *flags)
    try:
        async with asyncio.timeout(60):
            while (found := await lease(redis_bus)) is None or found.state != WorkerState.READY:
                assert process.poll() is None
                await asyncio.sleep(0.05)
        assert found.kv is not None
        assert (found.kv.num_blocks, found.kv.num_host_blocks) == (8, 5)
        assert found.speeds is not None
        epoch = await redis_bus.now_ms()
        started = [encode(EpochStarted(epoch, "scheduler", (found.instance,)))]
        await redis_bus.append_all(
            [Append(KEYS.plans, started, epoch, 0), Append(KEYS.outputs, started, epoch, 0)]
        )
        await redis_bus.append(Append(KEYS.plans, [encode(step_plan(1))], epoch, 1))
        cursor, results = START, []
        while not results:
            for entry in (await redis_bus.read({KEYS.outputs: cursor}, 1000, 10))[KEYS.outputs]:
                cursor = entry.id
                messages = map(decode, entry.messages)
                results += [message for message in messages if isinstance(message, StepResult)]
        assert results[0].step == 1
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate, timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "worker stopped" in said
    assert await lease(redis_bus) is None


async def test_a_model_that_is_never_served_ends_with_the_reason_and_78(
    redis_url: str, redis_bus: RedisBus, model_path: ModelPath
) -> None:
    process = start(redis_url, "--model", str(model_path("bloom")))
    _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == EXIT_HOPELESS, said
    assert "ALiBi" in said
    found = await lease(redis_bus)
    assert found is not None
    assert found.state == WorkerState.FAILED
    assert "ALiBi" in found.detail
