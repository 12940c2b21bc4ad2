"""Estimates what a GPU can serve before it is rented: the highest rate that meets latency targets.

    python -m benchmarks.simulator.capacity --trace sharegpt-like --model OPT-13B --gpu A100-40G \\
        --slo-ttft-ms 1000 --slo-tpot-ms 100

Our scheduler serves the trace repeatedly on a virtual clock, at other rates (a trace with arrivals
is played faster or slower). The targets hold for --slo-percentile percent of the requests,
separately for the time to the first token and for the mean time between tokens; requests of the
first tenth of the time are not counted. In any case the queue must not grow all the time: at most
2 % of the requests may wait when the last one arrives.

Writes a plot and a JSON object into --output.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.simulator.findings.capacity_plot import draw
from benchmarks.simulator.findings.capacity_search import Capacity, Objective, Trial, find_capacity
from benchmarks.simulator.findings.outcome import Outcome
from benchmarks.simulator.mypyc_build import prefer_compiled
from benchmarks.simulator.options import (
    Bench,
    add_options,
    bench_of,
    positive,
    shown_progress,
    workload_of,
)
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.workloads import Workload
from shared.errors import PageStreamError

_MOMENTS = 400  # at which memory and queues are sampled


def search(args: argparse.Namespace, bench: Bench, workload: Workload) -> Capacity:
    """Search for the capacity."""
    duration_s = args.duration

    def serve(rate: float, until_s: float) -> Outcome:
        requests = workload.requests(rate, duration_s, bench.seed)
        with shown_progress(f"{rate:.3g} requests/s", duration_s) as show:
            return run(
                bench.new_system(),
                requests,
                bench.worker,
                until_s=until_s,
                sample_every_s=duration_s / _MOMENTS,
                on_progress=show,
            )

    return find_capacity(
        serve,
        _objective(args),
        duration_s,
        args.first_rate or workload.own_rate or 1.0,
        bench.config.max_num_sequences,
        args.tolerance,
    )


def _objective(args: argparse.Namespace) -> Objective:
    ttft_s, tpot_s = (
        None if found is None else found / 1_000 for found in (args.slo_ttft_ms, args.slo_tpot_ms)
    )
    return Objective(ttft_s, tpot_s, args.slo_percentile)


def as_json(args: argparse.Namespace, bench: Bench, found: Capacity) -> dict[str, object]:
    """All results, with samples over time at the highest rate."""
    best = found.best
    return {
        "trace": args.trace,
        "model": bench.worker.model.name,
        "gpu": f"{bench.worker.num_gpus} x {bench.worker.gpu.name}",
        "calibration": args.calibration,
        "system": bench.system,
        "kv_slots": bench.worker.kv_slots,
        "seed": bench.seed,
        "duration_s": args.duration,
        "objective": {
            "ttft_ms": args.slo_ttft_ms,
            "tpot_ms": args.slo_tpot_ms,
            "percentile": args.slo_percentile,
        },
        "highest_rate": None if best is None else best.rate,
        "bottleneck_beyond": found.bottleneck,
        "rates": [_trial(trial) for trial in found.trials],
        "at_highest_rate": None if best is None else _course(best.outcome),
    }


def _trial(trial: Trial) -> dict[str, object]:
    outcome = trial.outcome
    busy_s = outcome.busy_s or 1.0
    return {
        "rate": trial.rate,
        "keeps": trial.keeps,
        "ttft_ms": _ms(trial.ttft_s),
        "tpot_ms": _ms(trial.tpot_s),
        "waiting_at_the_end_percent": round(100 * trial.waiting_share, 2),
        "complete": len(outcome.ids),
        "unfinished": outcome.num_unfinished,
        "preemptions": outcome.num_preemptions,
        "mean_batched_requests": round(outcome.mean_batched, 2),
        "kv_used_percent": round(100 * (1 - outcome.mean_memory["free"]), 2),
        "busy_time_percent": {
            limit.value: round(100 * spent_s / busy_s, 1)
            for limit, spent_s in outcome.limits_s.items()
        },
    }


def _ms(seconds: float) -> float | None:
    """In milliseconds; None if too many requests were never served."""
    return None if seconds == float("inf") else round(1_000 * seconds, 2)


def _course(outcome: Outcome) -> dict[str, list[float]]:
    moments = outcome.moments
    return {
        "time_s": [round(moment.time_s, 3) for moment in moments],
        "kv_used_percent": [
            round(100 * (1 - moment.memory.free / moment.memory.total), 2) for moment in moments
        ],
        "running": [moment.num_running for moment in moments],
        "waiting": [moment.num_waiting for moment in moments],
    }


def as_text(args: argparse.Namespace, found: Capacity) -> str:
    """A line per rate, and the conclusion."""
    heads = ("requests/s", "TTFT ms", "TPOT ms", "batched", "KV used", "preempted", "kept")
    lines = ["".join(f"{head:>12}" for head in heads)]
    for trial in found.trials:
        outcome = trial.outcome
        cells = (
            f"{trial.rate:.3f}",
            f"{1_000 * trial.ttft_s:,.0f}",
            f"{1_000 * trial.tpot_s:,.1f}",
            f"{outcome.mean_batched:.1f}",
            f"{100 * (1 - outcome.mean_memory['free']):.0f} %",
            f"{outcome.num_preemptions:,}",
            "yes" if trial.keeps else "no",
        )
        lines.append("".join(f"{cell:>12}" for cell in cells))
    lines.append(f"\nTTFT and TPOT are those of {args.slo_percentile:g} % of the requests.")
    if found.best is None:
        lines.append("No rate that was tried keeps the objective.")
    else:
        lines.append(f"Highest rate: {found.best.rate:.3f} requests/s.")
    if found.bottleneck is not None:
        lines.append(f"In the way of more: {found.bottleneck}.")
    return "\n".join(lines)


def main() -> None:
    """Search, print and plot; exits with 1 if the options cannot be simulated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add = parser.add_argument
    add("--slo-ttft-ms", type=positive, help="time to the first token; by default any")
    add("--slo-tpot-ms", type=positive, help="mean time between tokens; by default any")
    add("--slo-percentile", type=_percentile, default=99.0, help="of the requests (default: 99)")
    add("--duration", type=positive, default=600.0, help="seconds in which requests arrive")
    add("--first-rate", type=positive, help="to try; by default the trace's own, or 1")
    add("--tolerance", type=positive, default=0.02, help="of the rate (default: 0.02)")
    add("--output", type=Path, default=Path("capacity"), help="folder for plot and JSON")
    args = parser.parse_args()
    try:
        bench = bench_of(args)
        found = search(args, bench, workload_of(args, bench))
    except PageStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    numbers = as_json(args, bench, found)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "capacity.json").write_text(json.dumps(numbers, indent=1) + "\n")
    title = f"{bench.worker.model.name}, {bench.worker.num_gpus} x {bench.worker.gpu.name}"
    draw(found, _objective(args), f"{title}, {Path(args.trace).name}", args.output / "capacity.png")
    print(json.dumps(numbers) if args.json else as_text(args, found))


def _percentile(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100")
    return value


if __name__ == "__main__":
    prefer_compiled()
    main()
