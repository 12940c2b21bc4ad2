"""The results of a run on the virtual clock."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.findings.memory_use import HeldMemory
from benchmarks.simulator.system import MemoryUse, Progress, SimRequest, System, Work
from benchmarks.simulator.worker.worker_model import Limit, Parts

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of all engines together at one time."""

    time_s: float
    memory: MemoryUse
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The results of a run; columns have a row per complete request, in the order of completion.

    Attributes:
        ids: of the requests.
        arrivals_s: when they arrived.
        first_tokens_s: when they had their first token.
        ends_s: when they were complete.
        output_tokens: that each of their choices generated.
        num_refused: requests that could never have been served.
        num_unfinished: requests that had arrived and were not complete at the end.
        end_s: when the run ended.
        num_iterations: of all engines.
        num_tokens: generated, of all choices.
        num_prefill_tokens: prompt tokens computed, recomputed ones included.
        num_preemptions: of requests.
        busy_s: seconds in which an engine computed, summed over engines.
        mean_batched: requests with computed tokens in memory, averaged over ``busy_s``.
        limits_s: parts of ``busy_s``, by bottleneck.
        mean_memory: shares of the KV memory by use, averaged over time.
        mean_saved: memory saved by sharing, as a share of the need without sharing.
        moments: samples of memory and queues.
    """

    ids: IntColumn
    arrivals_s: FloatColumn
    first_tokens_s: FloatColumn
    ends_s: FloatColumn
    output_tokens: IntColumn
    num_refused: int
    num_unfinished: int
    end_s: float
    num_iterations: int
    num_tokens: int
    num_prefill_tokens: int
    num_preemptions: int
    busy_s: float
    mean_batched: float
    limits_s: dict[Limit, float]
    mean_memory: dict[str, float]
    mean_saved: float
    moments: tuple[Moment, ...]

    @property
    def latencies_s(self) -> FloatColumn:
        """Seconds from arrival to completion."""
        return self.ends_s - self.arrivals_s

    @property
    def normalized_latencies_s(self) -> FloatColumn:
        """Latency per token of output, as in the PagedAttention paper, section 6.1."""
        return self.latencies_s / self.output_tokens

    @property
    def mean_normalized_latency_s(self) -> float:
        """Mean over all complete requests; NaN if there are none."""
        return float(self.normalized_latencies_s.mean()) if len(self.ids) else float("nan")

    @property
    def ttfts_s(self) -> FloatColumn:
        """Seconds from arrival to the first token."""
        return self.first_tokens_s - self.arrivals_s

    @property
    def tpots_s(self) -> FloatColumn:
        """Mean seconds between tokens, of requests with more than one."""
        several = self.output_tokens > 1
        spent = (self.ends_s - self.first_tokens_s)[several]
        found: FloatColumn = spent / (self.output_tokens[several] - 1)
        return found


class Recorder:
    """Records the events of a run, at a low cost per iteration."""

    def __init__(self, systems: Sequence[System]) -> None:
        self.held = HeldMemory(systems)
        self._systems = systems
        self._open: dict[int, list[float]] = {}  # arrival, first token, output tokens; by id
        self._ids = array("q")
        self._output_tokens = array("q")
        self._arrivals_s = array("d")
        self._first_tokens_s = array("d")
        self._ends_s = array("d")
        self._num_refused = 0
        self._num_iterations = 0
        self._num_tokens = 0
        self._num_prefill_tokens = 0
        self._busy_s = 0.0
        self._batched_s = 0.0
        self._compute_s = 0.0
        self._memory_s = 0.0
        self._fixed_s = 0.0
        self._moments: list[Moment] = []

    @property
    def num_complete(self) -> int:
        """Number of complete requests."""
        return len(self._ids)

    def arrived(self, request: SimRequest) -> None:
        """Record an accepted request.

        Raises:
            ValueError: another one with its id is not complete.
        """
        if request.id in self._open:
            raise ValueError(f"two requests with the id {request.id}")
        self._open[request.id] = [request.arrival_s, float("nan"), request.output_tokens]

    def refused(self) -> None:
        """Record a request that can never be served."""
        self._num_refused += 1

    def iteration(self, work: Work, parts: Parts, duration_s: float, num_running: int) -> None:
        """Record the beginning of an iteration."""
        self._num_iterations += 1
        self._num_prefill_tokens += work.prefill_tokens
        self._busy_s += duration_s
        self._batched_s += duration_s * num_running
        self._compute_s += parts.compute_s
        self._memory_s += parts.memory_s
        self._fixed_s += parts.fixed_s

    def progressed(self, progress: Progress, now_s: float) -> None:
        """Record the end of an iteration."""
        self._num_tokens += progress.num_tokens
        for request_id in progress.first_tokens:
            self._open[request_id][1] = now_s
        for request_id in progress.finished:
            arrival_s, first_s, output_tokens = self._open.pop(request_id)
            self._ids.append(request_id)
            self._arrivals_s.append(arrival_s)
            self._first_tokens_s.append(first_s)
            self._ends_s.append(now_s)
            self._output_tokens.append(int(output_tokens))

    def sample(self, time_s: float) -> None:
        """Sample the memory and the queues of all engines."""
        systems = self._systems
        uses = [system.memory() for system in systems]
        memory = MemoryUse(
            total=sum(use.total for use in uses),
            token_states=sum(use.token_states for use in uses),
            reserved=sum(use.reserved for use in uses),
            internal=sum(use.internal for use in uses),
            external=sum(use.external for use in uses),
            free=sum(use.free for use in uses),
            shared=sum(use.shared for use in uses),
        )
        num_running = sum(system.num_running for system in systems)
        num_waiting = sum(system.num_waiting for system in systems)
        self._moments.append(Moment(time_s, memory, num_running, num_waiting))

    def outcome(self, end_s: float) -> Outcome:
        """The results so far."""
        self.held.close(end_s)
        return Outcome(
            ids=np.array(self._ids, np.int64),
            arrivals_s=np.array(self._arrivals_s),
            first_tokens_s=np.array(self._first_tokens_s),
            ends_s=np.array(self._ends_s),
            output_tokens=np.array(self._output_tokens, np.int64),
            num_refused=self._num_refused,
            num_unfinished=len(self._open),
            end_s=end_s,
            num_iterations=self._num_iterations,
            num_tokens=self._num_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_preemptions=sum(system.num_preemptions for system in self._systems),
            busy_s=self._busy_s,
            mean_batched=self._batched_s / self._busy_s if self._busy_s else 0.0,
            limits_s={
                Limit.COMPUTE: self._compute_s,
                Limit.MEMORY_BANDWIDTH: self._memory_s,
                Limit.FIXED_COSTS: self._fixed_s,
            },
            mean_memory=self.held.shares,
            mean_saved=self.held.saved,
            moments=tuple(self._moments),
        )
