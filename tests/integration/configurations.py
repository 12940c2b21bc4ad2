"""Engines that must all give the same tokens."""

from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Bus
from shared.messages.requests import Submit
from tests.support.engine import Answer, running_engine
from tests.support.weights import WEIGHTS


@dataclass(frozen=True)
class Configuration:
    """What may differ between engines without a difference in tokens."""

    block_size: int = 16
    pool_tokens: int = 16_384
    prefix_caching: bool = True
    max_plans_in_flight: int = 2
    max_num_batched_tokens: int = 512
    preemption: str = "recompute"
    host_tokens: int = 0
    kv_memory: str = "paged"

    def worker(self, model: Path) -> WorkerSettings:
        """Exact arithmetic on one thread."""
        return WorkerSettings(
            model=str(model),
            device="cpu",
            dtype="float32",
            num_threads=1,
            quantization=WEIGHTS,
            kv_memory=self.kv_memory,
            block_size=self.block_size,
            num_blocks=self.pool_tokens // self.block_size,
            num_host_blocks=self.host_tokens // self.block_size,
        )

    def scheduler(self) -> SchedulerSettings:
        """As many sequences at once as a small step allows."""
        return SchedulerSettings(
            engine_id=uuid4().hex,  # its logs are empty
            max_num_sequences=min(32, self.max_num_batched_tokens),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_plans_in_flight=self.max_plans_in_flight,
            prefix_caching=self.prefix_caching,
            preemption=self.preemption,
            watermark=0.0,
        )


@dataclass(frozen=True)
class Served:
    """What came out of an engine."""

    answers: list[Answer]
    num_recomputed: int  # preemptions of each kind
    num_swapped: int

    @property
    def num_preemptions(self) -> int:
        """Of either kind."""
        return self.num_recomputed + self.num_swapped

    def outputs(self) -> list[dict[int, list[int]]]:
        """Tokens by choice of each request."""
        return [answer.outputs for answer in self.answers]


async def serve(
    bus: Bus, model: Path, configuration: Configuration, *rounds: list[Submit]
) -> Served:
    """Start an engine, and submit one list of requests after the other has been answered."""
    async with running_engine(
        bus, configuration.worker(model), configuration.scheduler()
    ) as engine:
        answers: list[Answer] = []
        for submits in rounds:
            answers += await engine.generate(submits)
        await engine.until_idle()
    return Served(answers, engine.num_preemptions("recompute"), engine.num_preemptions("swap"))
