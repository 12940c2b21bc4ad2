"""What a worker's loop tells the metrics."""

import time
from dataclasses import dataclass

from gpu_worker.kv.memory import MappingStats
from gpu_worker.step.executor import Executor
from shared.messages.outputs import StepResult
from shared.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be seen of an executor between two steps.

    Attributes:
        now_s: when that was.
        sample_s: seconds of sampling in the last step.
        mapping: of its memory.
        num_resident: sequences that are here.
    """

    now_s: float
    sample_s: float
    mapping: MappingStats | None
    num_resident: int


class Observer:
    """Counts steps and where their time goes.

    Args:
        metrics: of this process.
        executor: whose steps they are.
    """

    def __init__(self, metrics: WorkerMetrics, executor: Executor) -> None:
        self._metrics = metrics
        self._executor = executor
        self._ended_s: float | None = None  # when the last step was computed

    def look(self) -> Look:
        """What is to be seen when a step was computed and the next is not begun."""
        executor = self._executor
        return Look(
            time.perf_counter(), executor.sample_s, executor.memory.mapping, len(executor.batch)
        )

    def step(self, result: StepResult, look: Look, overhead_s: float | None) -> None:
        """A step was computed, with this to be seen."""
        metrics = self._metrics
        metrics.steps.inc()
        metrics.step_seconds.observe(result.step_us / 1e6)
        metrics.model_seconds.observe(result.model_us / 1e6)
        metrics.sample_seconds.observe(look.sample_s)
        if (mapping := look.mapping) is not None:
            metrics.kv_map_seconds.observe(mapping.map_s)
            metrics.kv_map_wait_seconds.observe(mapping.wait_s)
            metrics.kv_mapped_bytes.set(mapping.in_use_bytes)
            metrics.kv_mappings.set(mapping.num_mappings)
        metrics.resident_sequences.set(look.num_resident)
        if self._ended_s is not None:
            waited_s = look.now_s - self._ended_s - result.step_us / 1e6
            metrics.wait_seconds.observe(max(0.0, waited_s))
        if overhead_s is not None:
            metrics.loop_overhead_seconds.observe(max(0.0, overhead_s))
        self._ended_s = look.now_s
