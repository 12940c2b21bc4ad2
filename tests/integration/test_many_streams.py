"""The demo model with many streams at once."""

from pathlib import Path

from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from tests.support.engine import running_engine
from tests.support.requests import submit

DEMO_MODEL = str(Path(__file__).parents[2] / "models" / "demo")


async def test_64_streams_of_128_tokens_finish_and_give_all_blocks_back(
    redis_bus: RedisBus,
) -> None:
    worker = WorkerSettings(model=DEMO_MODEL, device="cpu", num_threads=1, num_blocks=1024)
    submits = [
        submit(f"r{number}", range(10 + number, 42 + number), max_tokens=128, ignore_eos=True)
        for number in range(64)
    ]
    async with running_engine(redis_bus, worker, SchedulerSettings()) as engine:
        answers = await engine.generate(submits)
        await engine.until_idle()
    assert [len(answer.tokens) for answer in answers] == [128] * 64
    assert {answer.finish_reason for answer in answers} == {"length"}
