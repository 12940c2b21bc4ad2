"""Runs jobs in parallel, each only once, and shows their progress."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.paper.simulation import Job, Result, SystemName, simulate
from benchmarks.paper.workloads import Kind, Workload

# Normalized latency up to which a rate counts as sustained: half of Fig. 12's axis.
SUSTAINED_S = 0.5
# Rates of a curve, relative to the rate served when far more requests arrive.
_SHARES = (0.5, 0.8, 0.95, 1.1, 1.4)
_FEW_SHARES = (0.6, 1.0)
# For request-level batching, whose latency is high long before its throughput is reached.
_LOW_SHARES = (0.01, 0.05, 0.2, 0.6, 0.9)
_QUICK = 120.0  # factor by which runs are shorter


@dataclass(frozen=True, slots=True)
class Curve:
    """Normalized latency against the rate of requests.

    Attributes:
        system: that served them.
        rates: requests per second, ascending.
        latencies_s: mean normalized latency at each.
    """

    system: SystemName
    rates: tuple[float, ...]
    latencies_s: tuple[float, ...]

    def passes(self, limit_s: float) -> bool:
        """Whether the latency passes the limit between two of the runs."""
        return self.latencies_s[0] <= limit_s < max(self.latencies_s)

    def sustained(self, limit_s: float = SUSTAINED_S) -> float:
        """The rate at which the latency passes a limit, interpolated on logarithmic scales.

        It is the lowest or the highest rate if the latency does not pass the limit.
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
    """The options that all figures share.

    Attributes:
        progress: to show the progress on.
        trace_dir: folder with the traces; None for look-alikes.
        quick: whether runs are short, to test that they work.
        num_processes: to run in parallel; 0: only this process.
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
        """Duration of arrivals, in seconds."""
        return full_s / _QUICK if self.quick else full_s

    def run(self, jobs: Iterable[Job], title: str) -> list[Result]:
        """Run jobs; their results in the same order."""
        wanted = list(jobs)
        missing = list(dict.fromkeys(job for job in wanted if job not in self._results))
        task = self.progress.add_task(title, total=len(missing))
        if self.num_processes and len(missing) > 1:
            # The longest first, so that no single one is left at the end.
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
        """Latencies of each job's system at rates around the one that it can serve.

        The rate of each job must be more than its system can serve.
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
