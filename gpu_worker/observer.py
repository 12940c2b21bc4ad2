"""Metrics of a worker's steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.kv.memory import MappingStats
from gpu_worker.step.executor import Executor
from shared.messages.outputs import StepResult
from shared.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an executor between two steps.

    Attributes:
        now_s: when it was taken, by ``time.perf_counter``.
        sample_s: seconds of sampling in the last step.
        mapping: of its memory; None where blocks are not mapped.
        num_resident: sequences in the batch.
        sums_s: seconds in sums over ranks so far; None: there is one rank.
    """

    now_s: float
    sample_s: float
    mapping: MappingStats | None
    num_resident: int
    sums_s: float | None = None


class Observer:
    """Records each step and the parts of its time in metrics.

    Args:
        metrics: of this process.
        executor: of the steps.
        sums_s: seconds in sums over ranks so far; None where that is not measured.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        executor: Executor,
        sums_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._executor = executor
        self._sums_s = sums_s
        self._summed_s = 0.0  # after the last step
        self._ended_s: float | None = None  # when the last step was computed

    def snapshot(self) -> Snapshot:
        """The executor's state now; to be called after a step and before the next."""
        executor = self._executor
        return Snapshot(
            time.perf_counter(),
            executor.sample_s,
            executor.memory.mapping,
            len(executor.batch),
            self._sums_s(),
        )

    def step(self, result: StepResult, snapshot: Snapshot, overhead_s: float | None) -> None:
        """Record a step that was computed, with the snapshot taken after it."""
        metrics = self._metrics
        metrics.steps.inc()
        metrics.step_seconds.observe(result.step_us / 1e6)
        metrics.model_seconds.observe(result.model_us / 1e6)
        metrics.sample_seconds.observe(snapshot.sample_s)
        if (mapping := snapshot.mapping) is not None:
            metrics.kv_map_seconds.observe(mapping.map_s)
            metrics.kv_map_wait_seconds.observe(mapping.wait_s)
            metrics.kv_mapped_bytes.set(mapping.in_use_bytes)
            metrics.kv_mappings.set(mapping.num_mappings)
        if snapshot.sums_s is not None:
            metrics.sums_seconds.observe(snapshot.sums_s - self._summed_s)
            self._summed_s = snapshot.sums_s
        metrics.resident_sequences.set(snapshot.num_resident)
        if self._ended_s is not None:
            waited_s = snapshot.now_s - self._ended_s - result.step_us / 1e6
            metrics.wait_seconds.observe(max(0.0, waited_s))
        if overhead_s is not None:
            metrics.loop_overhead_seconds.observe(max(0.0, overhead_s))
        self._ended_s = snapshot.now_s
