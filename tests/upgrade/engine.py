"""An engine of the version on PYTHONPATH: ``python engine.py REDIS_URL ENGINE_ID [DIRECTORY_URL]``.

Scheduler and worker's loop are real. Tokens follow from the tokens before them, so that texts of
two versions can be compared without computing a model.
"""

import asyncio
import sys
import time
from random import Random
from typing import Any
from zlib import crc32

from gpu_worker.service import WorkerService
from scheduler_svc.observer import Observer
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.messages.leases import KVGeometry, ModelInfo, Speeds
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from shared.metrics import SchedulerMetrics
from tests.simulation.deployment.model import BLOCK_SIZE, Model, ModelExecutor
from tests.simulation.deployment.processes import Silent


class FixedModel(Model):
    """Draws tokens that depend on those before them alone."""

    def __init__(self) -> None:
        super().__init__(Random(1), 0.0)

    def draw(self, before: tuple[int, ...]) -> tuple[int, bool]:
        return 300 + crc32(repr(before).encode()) % 3_000, False


class SlowExecutor(ModelExecutor):
    """Steps take a while, so that streams run beside each other."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.005)  # a step of a model
        return super().execute(plan)


async def main(redis_url: str, engine_id: str, directory_url: str = "") -> None:
    """Serve until SIGTERM."""
    fleet: dict[str, Any] = {"directory_url": directory_url} if directory_url else {}
    directory: dict[str, Any] = {"directory": RedisBus(directory_url)} if directory_url else {}
    of_cluster = "+cluster" in redis_url  # earlier versions have no such URLs
    home: dict[str, Any] = {"home": EngineKeys(engine_id).info} if of_cluster else {}
    model = ModelInfo("demo", 4_096, 2_048, "float32", (1,))
    settings = SchedulerSettings(engine_id=engine_id, redis_url=redis_url, **fleet)
    observer = Observer(SchedulerMetrics("demo", engine_id))
    scheduler = SchedulerService(RedisBus(redis_url, **home), settings, observer, **directory)
    executor = SlowExecutor(FixedModel(), settings.max_num_batched_tokens)
    kv, speeds = KVGeometry(2_000, BLOCK_SIZE, 64, 0), Speeds(1e5, 1e9)
    bus = RedisBus(redis_url, **home)
    worker = WorkerService(bus, engine_id, executor, model, kv, speeds, Silent())
    await asyncio.gather(scheduler.run(), worker.run())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
