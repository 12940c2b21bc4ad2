"""What a worker's loop tells the metrics."""

import time

from gpu_worker.executor import Executor
from shared.messages import StepResult
from shared.metrics import WorkerMetrics


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

    def step(self, result: StepResult, overhead_s: float | None) -> None:
        """A step was computed; the next is not begun."""
        now = time.perf_counter()
        metrics = self._metrics
        metrics.steps.inc()
        metrics.step_seconds.observe(result.step_us / 1e6)
        metrics.model_seconds.observe(result.model_us / 1e6)
        metrics.sample_seconds.observe(self._executor.sample_s)
        if (mapping := self._executor.memory.mapping) is not None:
            metrics.kv_map_seconds.observe(mapping.map_s)
            metrics.kv_map_wait_seconds.observe(mapping.wait_s)
            metrics.kv_mapped_bytes.set(mapping.in_use_bytes)
            metrics.kv_mappings.set(mapping.num_mappings)
        metrics.resident_sequences.set(len(self._executor.batch))
        if self._ended_s is not None:
            metrics.wait_seconds.observe(max(0.0, now - self._ended_s - result.step_us / 1e6))
        if overhead_s is not None:
            metrics.loop_overhead_seconds.observe(max(0.0, overhead_s))
        self._ended_s = now
