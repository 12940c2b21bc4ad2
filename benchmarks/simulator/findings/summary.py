"""Summarizes a run on the virtual clock in a few numbers."""

from collections.abc import Mapping

import numpy as np

from benchmarks.simulator.findings.outcome import FloatColumn, Outcome

_PERCENTILES = (50, 90, 99)


def summarize(outcome: Outcome, wall_s: float) -> dict[str, object]:
    """The numbers for JSON and tables; times in seconds, of complete requests.

    Args:
        outcome: of the run.
        wall_s: duration of the simulation.
    """
    busy_s = outcome.busy_s or 1.0
    return {
        "virtual_s": round(outcome.end_s, 3),
        "wall_s": round(wall_s, 3),
        "times_faster_than_real": round(outcome.end_s / wall_s, 1) if wall_s else None,
        "requests": {
            "complete": len(outcome.ids),
            "unfinished": outcome.num_unfinished,
            "refused": outcome.num_refused,
        },
        "iterations": outcome.num_iterations,
        "tokens": outcome.num_tokens,
        "tokens_per_s": round(outcome.num_tokens / outcome.end_s, 2) if outcome.end_s else 0.0,
        "prompt_tokens_computed": outcome.num_prefill_tokens,
        "preemptions": outcome.num_preemptions,
        "mean_batched_requests": round(outcome.mean_batched, 3),
        "normalized_latency_s": _spread(outcome.normalized_latencies_s),
        "latency_s": _spread(outcome.latencies_s),
        "ttft_s": _spread(outcome.ttfts_s),
        "tpot_s": _spread(outcome.tpots_s),
        "memory_percent": {
            part: round(100 * share, 2) for part, share in outcome.mean_memory.items()
        },
        "saved_by_sharing_percent": round(100 * outcome.mean_saved, 2),
        "busy_time_percent": {
            limit.value: round(100 * spent_s / busy_s, 1)
            for limit, spent_s in outcome.limits_s.items()
        },
    }


def as_text(summary: Mapping[str, object]) -> str:
    """One line per number."""
    lines = []
    for name, value in summary.items():
        if isinstance(value, dict):
            text = ", ".join(f"{part} {_number(found)}" for part, found in value.items())
        else:
            text = _number(value)
        lines.append(f"{name.replace('_', ' '):<28}{text}")
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _spread(values: FloatColumn) -> dict[str, float]:
    if not len(values):
        return {}
    found = {"mean": float(values.mean())}
    for percentile in _PERCENTILES:
        found[f"p{percentile}"] = float(np.percentile(values, percentile))
    return {name: round(value, 6) for name, value in found.items()}
