"""One run on the virtual clock, as a job that another process can execute."""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from benchmarks.baselines.faster_transformer import FasterTransformer
from benchmarks.baselines.orca import Orca, Reservation
from benchmarks.paper.workloads import Workload
from benchmarks.simulator.findings.outcome import Outcome
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, System, Work
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.worker.beam_samples import BeamDraws
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from shared.messages.plans import BeamStep

_MAX_LEN = 2_048
_MAX_SEQUENCES = 256  # running at once, in all systems
_MAX_BATCHED_TOKENS = 2_560
_BEAM_STEPS = 400  # over which copies are averaged


class SystemName(StrEnum):
    """The simulated systems."""

    FASTER_TRANSFORMER = "FasterTransformer"
    ORCA_MAX = "Orca (Max)"
    ORCA_POW2 = "Orca (Pow2)"
    ORCA_ORACLE = "Orca (Oracle)"
    PAGESTREAM = "PageStream"


ORCAS = (SystemName.ORCA_MAX, SystemName.ORCA_POW2, SystemName.ORCA_ORACLE)
_RESERVATIONS = dict(zip(ORCAS, Reservation, strict=True))


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and its GPUs."""

    model: str
    gpu: str
    num_gpus: int = 1

    def worker(self) -> WorkerModel:
        """The model of the worker's times."""
        return WorkerModel(find_model(self.model), find_gpu(self.gpu), self.num_gpus)

    def __str__(self) -> str:
        return f"{self.model}, {self.num_gpus} x {self.gpu}"


OPT_13B = Setup("OPT-13B", "A100-40G")
OPT_66B = Setup("OPT-66B", "A100-40G", 4)
OPT_175B = Setup("OPT-175B", "A100-80G", 8)
LLAMA_13B = Setup("LLaMA-13B", "A100-40G")


@dataclass(frozen=True, slots=True)
class Job:
    """One run to simulate.

    Attributes:
        setup: model and GPUs.
        system: that serves.
        workload: of the requests.
        rate: requests per second.
        duration_s: of the arrivals.
        seed: of all random numbers.
        drains: whether the run goes on until all requests are served.
        block_size: in tokens, of our scheduler.
        preemption: of our scheduler.
    """

    setup: Setup
    system: SystemName
    workload: Workload
    rate: float
    duration_s: float
    seed: int = 0
    drains: bool = True
    block_size: int = 16
    preemption: str = "auto"

    def at(self, rate: float) -> "Job":
        """The same job with another rate."""
        return replace(self, rate=rate)


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run.

    Attributes:
        latency_s: mean normalized latency of served requests, in seconds per token.
        throughput: requests served per second of the arrivals' duration.
        mean_batched: requests in the batch, averaged over time.
        memory: shares of the KV memory, averaged over time.
        saved: blocks saved by sharing, as a share of those needed without.
        num_preemptions: of requests.
        num_requests: served.
        iteration_s: mean duration of an iteration.
        settled: share of token states after the first tenth of the time, in which memory fills.
    """

    latency_s: float
    throughput: float
    mean_batched: float
    memory: dict[str, float]
    saved: float
    num_preemptions: int
    num_requests: int
    iteration_s: float
    settled: float


def simulate(job: Job) -> Result:
    """Run the job."""
    worker = job.setup.worker()
    requests = job.workload.requests(job.rate, job.duration_s, job.seed)
    until_s = float("inf") if job.drains else job.duration_s
    sharing = None
    system = _system(job, worker)
    if isinstance(system, PageStream) and _shares(job.workload):
        system = sharing = Sharing(system)
    outcome = run(system, requests, worker, until_s=until_s, sample_every_s=job.duration_s / 500)
    return Result(
        latency_s=outcome.mean_normalized_latency_s,
        throughput=len(outcome.ids) / job.duration_s,
        mean_batched=outcome.mean_batched,
        memory=outcome.mean_memory,
        saved=sharing.saved if sharing else 0.0,
        num_preemptions=outcome.num_preemptions,
        num_requests=len(outcome.ids),
        iteration_s=outcome.busy_s / max(outcome.num_iterations, 1),
        settled=_settled(outcome, job.duration_s),
    )


def _settled(outcome: Outcome, duration_s: float) -> float:
    uses = [moment.memory for moment in outcome.moments if moment.time_s >= duration_s / 10]
    total = sum(use.total for use in uses)
    return sum(use.token_states for use in uses) / total if total else 0.0


def _system(job: Job, worker: WorkerModel) -> System:
    slots = worker.kv_slots
    if job.system is SystemName.FASTER_TRANSFORMER:
        return FasterTransformer(slots, _MAX_LEN)
    if job.system is not SystemName.PAGESTREAM:
        return Orca(
            slots,
            _RESERVATIONS[job.system],
            _MAX_LEN,
            _MAX_SEQUENCES,
            copied_bytes_per_token=worker.model.kv_bytes_per_token
            * copies_per_step(job.workload.beam_width),
        )
    config = PageStreamConfig(
        block_size=job.block_size,
        max_num_sequences=_MAX_SEQUENCES,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        prefix_caching=job.workload.shared_prefix > 0,
        preemption=job.preemption,
    )
    return PageStream(worker, config, job.seed)


def _shares(workload: Workload) -> bool:
    return workload.num_samples > 1 or workload.beam_width > 0


@lru_cache(maxsize=8)
def copies_per_step(beam_width: int) -> float:
    """Beams per step that must be copied as a whole if each has contiguous memory of its own.

    These are all but the first of the beams with the same parent.
    """
    if beam_width < 2:
        return 0.0
    draws = BeamDraws(np.random.default_rng(0))
    scores = np.zeros(beam_width, np.float32)
    copies = 0
    for _ in range(_BEAM_STEPS):
        handles = np.arange(beam_width, dtype=np.int32)
        step = BeamStep(0, handles, scores, handles, handles)
        (found,) = draws.candidates([step], [beam_width], [False])
        scores = found.scores - found.scores.max()
        copies += beam_width - len(np.unique(found.parents))
    return copies / _BEAM_STEPS


class Sharing:
    """A scheduler whose blocks are counted every few iterations.

    Args:
        system: that serves.
    """

    _EACH = 5  # iterations

    def __init__(self, system: PageStream) -> None:
        self._system = system
        self._num_iterations = 0
        self._num_shared = 0
        self._num_used = 0

    @property
    def saved(self) -> float:
        """Blocks saved by sharing, as a share of those needed without."""
        needed = self._num_shared + self._num_used
        return self._num_shared / needed if needed else 0.0

    def submit(self, request: SimRequest) -> None:
        self._system.submit(request)

    def start(self, now_s: float) -> Work | None:
        return self._system.start(now_s)

    def finish(self, now_s: float) -> Progress:
        self._num_iterations += 1
        if self._num_iterations % self._EACH == 0:
            stats = self._system.core.stats()
            self._num_shared += stats.num_shared_blocks
            self._num_used += stats.num_used_blocks
        return self._system.finish(now_s)

    def memory(self) -> MemoryUse:
        return self._system.memory()

    @property
    def num_running(self) -> int:
        return self._system.num_running

    @property
    def num_waiting(self) -> int:
        return self._system.num_waiting

    @property
    def num_preemptions(self) -> int:
        return self._system.num_preemptions
