"""Serves a trace on a virtual clock, by our scheduler or a baseline, with a model of the worker.

    python -m benchmarks.simulator.simulate --trace sharegpt-like --rate 2 --duration 3600
    python -m benchmarks.simulator.simulate --trace azure.csv --model Llama-3-8B --gpu H100 \\
        --engines 4

Nothing but the schedule is computed; docs/SIMULATOR.md explains the durations.
"""

import argparse
import json
import sys
import time

from benchmarks.simulator.findings.summary import as_text, summarize
from benchmarks.simulator.mypyc_build import prefer_compiled
from benchmarks.simulator.options import (
    add_options,
    bench_of,
    positive,
    shown_progress,
    whole,
    workload_of,
)
from benchmarks.simulator.routers import least_loaded, round_robin
from benchmarks.simulator.virtual_clock import run_many
from shared.errors import PageStreamError

_ROUTERS = {"round-robin": round_robin, "least-loaded": least_loaded}


def simulate(args: argparse.Namespace) -> dict[str, object]:
    """Run once; the numbers of the run.

    Raises:
        PageStreamError: an option cannot be used, or the trace cannot be read.
    """
    bench = bench_of(args)
    workload = workload_of(args, bench)
    requests = workload.requests(args.rate, args.duration, args.seed)
    systems = [bench.new_system() for _ in range(args.engines)]
    began = time.perf_counter()
    with shown_progress(args.trace, args.duration) as show:
        outcome = run_many(
            systems,
            requests,
            bench.worker,
            router=_ROUTERS[args.router](args.engines),
            until_s=args.duration if args.stop else float("inf"),
            sample_every_s=float("inf"),  # no samples are shown
            on_progress=show,
        )
    worker = bench.worker
    return {
        "model": worker.model.name,
        "gpu": f"{worker.num_gpus} x {worker.gpu.name}",
        "kv_slots": worker.kv_slots,
        "calibration": args.calibration,
        "system": bench.system,
        "engines": args.engines,
        "seed": bench.seed,
        "left_out": workload.num_left_out,
        **summarize(outcome, time.perf_counter() - began),
    }


def main() -> None:
    """Print the numbers; exits with 1 if the options cannot be simulated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--rate", type=positive, help="requests per second; by default the trace's own"
    )
    parser.add_argument(
        "--duration", type=positive, default=3_600.0, help="seconds in which requests arrive"
    )
    parser.add_argument("--stop", action="store_true", help="stop then, with requests unserved")
    parser.add_argument("--engines", type=whole, default=1, help="each with its own GPUs")
    parser.add_argument("--router", choices=_ROUTERS, default="round-robin")
    args = parser.parse_args()
    try:
        found = simulate(args)
    except PageStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(json.dumps(found) if args.json else as_text(found))


if __name__ == "__main__":
    prefer_compiled()
    main()
