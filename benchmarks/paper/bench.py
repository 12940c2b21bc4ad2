"""Runs jobs, several at a time, each only once, and shows how far they are."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.paper.simulation import Job, Result, SystemName, simulate
from benchmarks.paper.workloads import Kind, Workload

SUSTAINED_S = (
    0.5  # normalized latency up to which a rate counts as sustained: half of Fig. 12's axis
)
# Rates of a curve, in what is served of far more requests than can be.
_SHARES = (0.5, 0.8, 0.95, 1.1, 1.4)
_FEW_SHARES = (0.6, 1.0)
# Of request-level batching, whose latency is high long before its throughput is reached.
_LOW_SHARES = (0.01, 0.05, 0.2, 0.6, 0.9)
_QUICK = 120.0  # times shorter


@dataclass(frozen=True, slots=True)
class Curve:
    """Normalized latency against the rate of requests.

    Attributes:
        system: whose.
        rates: requests per second, ascending.
        latencies_s: mean normalized latency at each.
    """

    system: SystemName
    rates: tuple[float, ...]
    latencies_s: tuple[float, ...]

    def passes(self, limit_s: float) -> bool:
        """Whether the limit is between two of the runs."""
        return self.latencies_s[0] <= limit_s < max(self.latencies_s)

    def sustained(self, limit_s: float = SUSTAINED_S) -> float:
        """The rate at which the latency passes a limit, between the runs in proportion of logs.

        The lowest or the highest rate if it does not.
        """
        above = [latency_s > limit_s for latency_s in self.latencies_s]
        if above[0] or not any(above):
            return self.rates[0] if above[0] else self.rates[-1]
        end = above.index(True)
        low, high = np.log(self.latencies_s[end - 1 : end + 1])
        share = float((np.log(limit_s) - low) / (high - low))
        return self.rates[end - 1] + share * (self.rates[end] - self.rates[end - 1])


@dataclass(slots=True)
class Bench:
    """What all figures share.

    Attributes:
        progress: where it is shown.
        trace_dir: where traces are; None for look-alikes.
        quick: whether runs are so short that only their working is tested.
        num_processes: at a time; 0 for none but this one.
    """

    progress: Progress
    trace_dir: Path | None
    quick: bool
    num_processes: int
    _results: dict[Job, Result] = field(default_factory=dict)

    def workload(self, kind: Kind, shared_prefix: int = 0) -> Workload:
        """Requests of a kind, from the traces if there are any."""
        return Workload(kind, self.trace_dir, shared_prefix=shared_prefix)

    def seconds(self, full_s: float) -> float:
        """How long requests arrive."""
        return full_s / _QUICK if self.quick else full_s

    def run(self, jobs: Iterable[Job], title: str) -> list[Result]:
        """Results in the order of the jobs."""
        wanted = list(jobs)
        missing = list(dict.fromkeys(job for job in wanted if job not in self._results))
        task = self.progress.add_task(title, total=len(missing))
        if self.num_processes and len(missing) > 1:
            # The longest first, so that none is left alone at the end.
            missing.sort(key=lambda job: job.rate * job.duration_s, reverse=True)
            with ProcessPoolExecutor(self.num_processes, get_context("spawn")) as pool:
                futures = {pool.submit(simulate, job): job for job in missing}
                for future in as_completed(futures):
                    self._results[futures[future]] = future.result()
                    self.progress.advance(task)
        else:
            for job in missing:
                self._results[job] = simulate(job)
                self.progress.advance(task)
        return [self._results[job] for job in wanted]

    def curves(self, jobs: Sequence[Job], title: str) -> list[Curve]:
        """Latencies of each job's system around the rate that it can serve.

        The rate of each job is one that is more than it can serve.
        """
        overload = [replace(job, drains=False) for job in jobs]
        limits = self.run(overload, f"{title}: what can be served")
        planned = [
            (job, [job.at(share * max(limit.throughput, 0.01)) for share in self._shares(job)])
            for job, limit in zip(jobs, limits, strict=True)
        ]
        results = iter(self.run([each for _, line in planned for each in line], f"{title}: rates"))
        return [
            Curve(
                job.system,
                tuple(each.rate for each in line),
                tuple(next(results).latency_s for _ in line),
            )
            for job, line in planned
        ]

    def _shares(self, job: Job) -> tuple[float, ...]:
        if self.quick:
            return _FEW_SHARES
        if job.system is SystemName.FASTER_TRANSFORMER:
            return _LOW_SHARES
        return _SHARES
