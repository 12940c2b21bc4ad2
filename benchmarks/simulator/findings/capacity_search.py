"""Finds the highest rate that meets latency targets, and the bottleneck of higher rates.

The search is a bisection, as latencies rise with the rate. All runs have the same seed, so that
they differ in nothing but the rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.simulator.findings.outcome import FloatColumn, Outcome

_DRAIN_S, _DRAIN_SHARE = 120.0, 0.5  # after the last arrival; later ends count as late
_WARM_UP = 0.1  # share of the time whose requests are not counted: the engine is not full yet
_MAY_WAIT = 0.02  # share of all requests, when the last one arrives; with more the queue only grows
_FULL = 0.9  # used share of the KV memory
_OFTEN = 0.5  # share of the samples in which requests wait
_FEWEST = 10  # requests: fewer at a rate are no evidence
_HIGHEST = 1e5  # requests per second


class Bottleneck(StrEnum):
    """The reason why a higher rate does not meet the targets."""

    COMPUTE = "compute"
    MEMORY_BANDWIDTH = "memory bandwidth"
    FIXED_COSTS = "fixed costs"
    KV_MEMORY = "KV memory"
    SEQUENCES = "limit of running sequences"


@dataclass(frozen=True, slots=True)
class Objective:
    """The latency targets.

    Attributes:
        ttft_s: time to the first token; None: no target.
        tpot_s: mean time between the tokens of a request; None: no target.
        percentile: of the requests that must meet each target.
    """

    ttft_s: float | None
    tpot_s: float | None
    percentile: float


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The run at one rate.

    Attributes:
        rate: requests per second.
        outcome: of the run.
        ttft_s: at the objective's percentile; infinite if too many are not served in time.
        tpot_s: at the objective's percentile, in the same way.
        waiting_share: share of the requests that wait when the last one arrives.
        keeps: whether the targets are met, and the queue does not only grow.
    """

    rate: float
    outcome: Outcome
    ttft_s: float
    tpot_s: float
    waiting_share: float
    keeps: bool


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """The result of the search.

    Attributes:
        best: the highest rate that meets the targets; None if not even the lowest does.
        beyond: the lowest rate that does not.
        bottleneck: of that rate.
        trials: all, by rate.
    """

    best: Trial | None
    beyond: Trial | None
    bottleneck: Bottleneck | None
    trials: tuple[Trial, ...]


Serve = Callable[[float, float], Outcome]
"""Serves the workload at a rate until a time, with a new engine."""


def find_capacity(
    serve: Serve,
    objective: Objective,
    duration_s: float,
    first_rate: float,
    max_running: int,
    tolerance: float = 0.02,
) -> Capacity:
    """Double or halve the rate until the capacity is between two rates, then bisect.

    Args:
        serve: runs a rate.
        objective: the targets.
        duration_s: of the arrivals.
        first_rate: to try.
        max_running: most sequences that the engine runs at once.
        tolerance: remaining gap, as a share of the rate.
    """
    trials: list[Trial] = []

    def keeps(rate: float) -> bool:
        outcome = serve(rate, (1 + _DRAIN_SHARE) * duration_s + _DRAIN_S)
        trials.append(judge(outcome, objective, rate, duration_s))
        return trials[-1].keeps

    low, high = 0.0, float("inf")
    lowest = _FEWEST / duration_s
    rate = max(first_rate, lowest)
    while (low == 0 or high == float("inf")) and lowest <= rate <= _HIGHEST:
        if keeps(rate):
            low, rate = rate, 2 * rate
        else:
            high, rate = rate, rate / 2
    while low > 0 and high < float("inf") and high - low > tolerance * high:
        rate = (low + high) / 2
        low, high = (rate, high) if keeps(rate) else (low, rate)
    found = sorted(trials, key=lambda trial: trial.rate)
    best = next((trial for trial in reversed(found) if trial.rate == low), None)
    beyond = next((trial for trial in found if trial.rate == high), None)
    why = None if beyond is None else bottleneck(beyond.outcome, max_running)
    return Capacity(best, beyond, why, tuple(found))


def judge(outcome: Outcome, objective: Objective, rate: float, duration_s: float) -> Trial:
    """Whether a run meets the targets; requests not served at its end count as never served."""
    judged = outcome.arrivals_s >= _WARM_UP * duration_s
    several = outcome.output_tokens > 1
    tpots = (outcome.ends_s - outcome.first_tokens_s) / np.maximum(outcome.output_tokens - 1, 1)
    ttft_s = _percentile(outcome.ttfts_s[judged], outcome.num_unfinished, objective.percentile)
    tpot_s = _percentile(tpots[judged & several], outcome.num_unfinished, objective.percentile)
    at_end = [moment for moment in outcome.moments if moment.time_s <= duration_s]
    num_waiting = at_end[-1].num_waiting if at_end else 0
    num_requests = len(outcome.ids) + outcome.num_unfinished
    waiting_share = num_waiting / max(num_requests, 1)
    keeps = (
        len(outcome.ids) > 0
        and num_waiting <= max(_MAY_WAIT * num_requests, 2)
        and (objective.ttft_s is None or ttft_s <= objective.ttft_s)
        and (objective.tpot_s is None or tpot_s <= objective.tpot_s)
    )
    return Trial(rate, outcome, ttft_s, tpot_s, waiting_share, keeps)


def _percentile(values: FloatColumn, num_late: int, percentile: float) -> float:
    """The smallest value that so many percent do not exceed, if ``num_late`` more are infinite."""
    rank = int(np.ceil(percentile / 100 * (len(values) + num_late))) - 1
    if rank >= len(values) or not len(values):
        return float("inf") if num_late else 0.0
    return float(np.sort(values)[max(rank, 0)])


def bottleneck(outcome: Outcome, max_running: int) -> Bottleneck:
    """The bottleneck of a run.

    If requests wait for memory (most of it is used) or for sequences (as many run as may), that is
    the bottleneck. Otherwise they wait because iterations take long, and it is what those spend
    most time on.
    """
    waiting = [moment for moment in outcome.moments if moment.num_waiting]
    if len(waiting) > 0.1 * len(outcome.moments):
        full = sum(1 - moment.memory.free / moment.memory.total > _FULL for moment in waiting)
        if full >= _OFTEN * len(waiting):
            return Bottleneck.KV_MEMORY
        crowded = sum(moment.num_running >= max_running for moment in waiting)
        if crowded >= _OFTEN * len(waiting):
            return Bottleneck.SEQUENCES
    longest = max(outcome.limits_s, key=outcome.limits_s.__getitem__)
    return Bottleneck[longest.name]
