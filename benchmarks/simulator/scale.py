"""Measures the simulator: time and memory of a large fleet, and whether long queues slow it down.

    python -m benchmarks.simulator.scale [--requests 1000000] [--engines 64] \\
        [--waiting 100 1000 ...] [--json]

It first serves many short requests with many engines. Then one engine serves with ever longer
queues: the cost of a served request must not depend on their length.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np

from benchmarks.simulator.lengths import DATASETS
from benchmarks.simulator.mypyc_build import prefer_compiled
from benchmarks.simulator.options import shown_progress, whole
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import SimRequest
from benchmarks.simulator.traces import with_poisson_arrivals
from benchmarks.simulator.virtual_clock import run_many
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from benchmarks.simulator.workloads import look_alikes

_RATE = 20.0  # requests per second and engine
_QUEUES = (100, 1_000, 10_000, 100_000)
_SERVED = 1_000  # requests, during which the queue's length hardly changes
_CONFIG = PageStreamConfig(prefix_caching=False)
_LIMIT = 2_048


def fleet(num_requests: int, num_engines: int) -> dict[str, float]:
    """Serve so many requests with so many engines."""
    worker = WorkerModel(find_model("OPT-13B"), find_gpu("A100-80G"))
    rate = _RATE * num_engines
    requests = with_poisson_arrivals(_lengths(0), rate, np.random.default_rng(1))
    systems = [PageStream(worker, _CONFIG) for _ in range(num_engines)]
    began, cpu_began = time.perf_counter(), time.process_time()
    with shown_progress("fleet", num_requests / rate) as show:
        outcome = run_many(
            systems,
            islice(requests, num_requests),
            worker,
            sample_every_s=float("inf"),
            on_progress=show,
        )
    cpu_s = time.process_time() - cpu_began
    return {
        "requests": len(outcome.ids),
        "engines": num_engines,
        "iterations": outcome.num_iterations,
        "tokens": outcome.num_tokens,
        "virtual_s": round(outcome.end_s, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(cpu_s, 1),
        "cpu_us_per_request": round(1e6 * cpu_s / num_requests, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024, 1),
    }


def queue(num_waiting: int) -> float:
    """Microseconds of CPU time per served request with so many waiting requests.

    Whenever a request is served, a new one arrives.
    """
    worker = WorkerModel(find_model("OPT-13B"), find_gpu("A100-80G"))
    system = PageStream(worker, _CONFIG)
    lengths = _lengths(2)
    for request in islice(lengths, num_waiting):
        system.submit(request)
    _serve(system, lengths, _SERVED // 2)  # until as many run as can
    began = time.process_time()
    _serve(system, lengths, _SERVED)
    return 1e6 * (time.process_time() - began) / _SERVED


def _serve(system: PageStream, lengths: Iterator[SimRequest], num_requests: int) -> None:
    num_served = 0
    while num_served < num_requests:
        system.start(0.0)
        num_finished = len(system.finish(0.0).finished)
        num_served += num_finished
        for request in islice(lengths, num_finished):
            system.submit(request)


def _lengths(seed: int) -> Iterator[SimRequest]:
    dataset = next(found for found in DATASETS if found.name == "alpaca")
    return look_alikes(dataset, _LIMIT, np.random.default_rng(seed))


def main() -> None:
    """Measure and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=whole, default=1_000_000)
    parser.add_argument("--engines", type=whole, default=64)
    parser.add_argument(
        "--waiting",
        type=whole,
        nargs="*",
        default=_QUEUES,
        metavar="N",
        help="lengths of the queue",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = fleet(args.requests, args.engines)  # first, because it measures the peak of memory
    if not args.json:
        for name, value in found.items():
            print(f"{name:<20}{value:>16,}", flush=True)
    queues = {}
    for num_waiting in args.waiting:
        queues[num_waiting] = round(queue(num_waiting), 1)
        if not args.json:
            spent_us = queues[num_waiting]
            print(f"{num_waiting:>9,} waiting: {spent_us:.0f} us per served request", flush=True)
    if args.json:
        print(json.dumps({"us_per_request_by_waiting": queues, "fleet": found}))


if __name__ == "__main__":
    prefer_compiled()
    main()
