"""The highest rate that is served as promised, and what is in the way of a higher one.

Found by bisection: latencies rise with the rate. All runs have the same seed, so that they differ
in nothing but the rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.simulator.findings.outcome import FloatColumn, Outcome

_DRAIN_S, _DRAIN_SHARE = 120.0, 0.5  # after the last arrival; who is not served then is late
_WARM_UP = 0.1  # of that time: who arrives in it is not judged, the engine is not filled yet
_MAY_WAIT = 0.02  # of all requests, when the last one arrives; with more the queue only grows
_FULL = 0.9  # used share of the KV memory
_OFTEN = 0.5  # of the moments in which requests wait
_FEWEST = 10  # requests: a lower rate says nothing
_HIGHEST = 1e5  # requests per second


class Bottleneck(StrEnum):
    """Why a higher rate is not served as promised."""

    COMPUTE = "compute"
    MEMORY_BANDWIDTH = "memory bandwidth"
    FIXED_COSTS = "fixed costs"
    KV_MEMORY = "KV memory"
    SEQUENCES = "limit of running sequences"


@dataclass(frozen=True, slots=True)
class Objective:
    """What is promised to most requests.

    Attributes:
        ttft_s: time to the first token; None: nothing is promised.
        tpot_s: mean time between the tokens of a request; likewise.
        percentile: of the requests, for each of both.
    """

    ttft_s: float | None
    tpot_s: float | None
    percentile: float


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One rate.

    Attributes:
        rate: requests per second.
        outcome: of the run.
        ttft_s: at the objective's percentile; infinite if too many are not served in time.
        tpot_s: likewise.
        waiting_share: requests that wait when the last one arrives, of all.
        keeps: whether the objective is kept, and the queue does not only grow.
    """

    rate: float
    outcome: Outcome
    ttft_s: float
    tpot_s: float
    waiting_share: float
    keeps: bool


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """What was found.

    Attributes:
        best: the highest rate that keeps the objective; None if not even the lowest does.
        beyond: the lowest rate that does not.
        bottleneck: what is in the way there.
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
    """Double or halve the rate until it is between two, then halve the gap between them.

    Args:
        serve: does a run.
        objective: what to keep.
        duration_s: in which requests arrive.
        first_rate: to try.
        max_running: sequences that the engine runs at once.
        tolerance: the gap that is left, as a share of the rate.
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
    """Whether a run keeps the objective; who is not served at its end counts as never served."""
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
    """What a run was held up by.

    If requests wait for room (most of the memory is used, or as many sequences run as may) it is
    that; otherwise they wait because iterations take long, and it is what these spend time on.
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
