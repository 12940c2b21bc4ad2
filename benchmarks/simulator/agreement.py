"""Compares the simulator with reality: the same requests, served for real and on the virtual clock.

    python -m benchmarks.simulator.agreement [--requests 200] [--rate 8] [--runs 3] [--json]

The demo model is served on this machine's CPU with a pool so small that requests are preempted.
Before and after the compared load there is a short load of other requests. The costs of an
iteration are fitted to both, so that a change in the machine's speed affects the fit as well.
Requests of one token, sent one after the other, give the time that a request spends outside of the
engine. Compared are the number of preemptions, and the mean latency that clients measure.

Both sides of the comparison are the same scheduler with the same settings; the test is of the
simulated parts, time and the worker. A machine whose speed changes between the loads disturbs the
comparison, and a queue amplifies that. So the load is also simulated with the machine's speed in
each second, by how long that second's iterations took relative to the fit.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.simulator.options import positive, whole
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.served import Served, running_engine
from benchmarks.simulator.system import SimRequest
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.worker.drift import DriftingEngine, DriftingWorker, slowdowns
from benchmarks.simulator.worker.fitted_model import FittedWorker, fit, timed_steps
from benchmarks.simulator.worker.model_shapes import Model
from scheduler_svc.core.config import Preemption
from scheduler_svc.core.events import Preempted
from scheduler_svc.replay import replay
from shared.errors import PageStreamError

_DEMO = Model("demo", 6, 256, 4, 2, 64, 704, 3, 4_096, 2_048, True)
_CONFIG = PageStreamConfig(
    max_num_sequences=64, max_num_batched_tokens=512, preemption=Preemption.RECOMPUTE
)
_NUM_ALONE = 12  # requests of one token
_PROMPTS, _OUTPUTS = (16, 96), (32, 192)  # tokens, from and to
_WARM_UP = 10  # requests before anything is measured


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of one comparison.

    Attributes:
        preemptions: real, simulated, and simulated at the machine's speed of each second.
        latencies_s: means, in the same order.
        slowdowns: of the machine relative to the fit during the compared load: the mean over its
            seconds, and the tenth and the ninetieth percentile.
        costs_us: fitted, of an iteration, of a prompt token, of a decoding sequence, and of 1,000
            tokens attended to.
        outside_ms: time of a request outside of the engine.
    """

    preemptions: tuple[int, int, int]
    latencies_s: tuple[float, float, float]
    slowdowns: tuple[float, float, float]
    costs_us: tuple[float, ...]
    outside_ms: float

    @property
    def preemption_ratios(self) -> tuple[float, float]:
        """Simulated over real, with the fit and at the machine's speed."""
        real, *simulated = self.preemptions
        first, second = (found / real if real else float("nan") for found in simulated)
        return first, second

    @property
    def latency_ratios(self) -> tuple[float, float]:
        """Simulated over real, in the same order."""
        real, fitted, corrected = self.latencies_s
        return fitted / real, corrected / real


def compare(num_requests: int, rate: float, num_blocks: int, seed: int) -> Comparison:
    """Serve, fit and simulate.

    Raises:
        PageStreamError: the engine could not be started, or failed.
    """
    random = np.random.default_rng(seed)
    config = replace(_CONFIG, kv_slots=num_blocks * _CONFIG.block_size)
    earlier = _requests(num_requests // 4, rate, random, first_id=10_000)
    compared = _requests(num_requests, rate, random, first_id=20_000)
    later = _requests(num_requests // 4, rate, random, first_id=30_000)
    alone = [SimRequest(number, 0.0, 32, 1) for number in range(_NUM_ALONE)]
    with tempfile.TemporaryDirectory(prefix="pagestream-") as folder:
        flags = _flags(config, num_blocks)
        with running_engine(Path(folder), flags) as engine:
            engine.serve(_requests(_WARM_UP, rate, random, first_id=1_000))
            outside = [engine.serve([request])[0].latency_s for request in alone]
            engine.serve(earlier)
            first = len(timed_steps(engine.recording))
            served = engine.serve(compared)
            behind = len(timed_steps(engine.recording))
            engine.serve(later)
            recording = engine.recording
        steps = timed_steps(recording)
        slots = num_blocks * _CONFIG.block_size
        worker = fit(steps[_NUM_ALONE:first] + steps[behind:], _DEMO, slots)
        num_preempted = sum(
            isinstance(event, Preempted)
            for moment in replay(recording)
            if first + 2 < moment.step <= behind + 2
            for event in moment.events
        )
    seconds = slowdowns(steps[first:behind], worker)
    outside_s = max(0.0, float(np.median(outside)) - _alone_s(worker))
    fitted = run(PageStream(worker, config), compared, worker)
    drifting = DriftingWorker(worker, seconds, compared[0].arrival_s)
    corrected = run(DriftingEngine(drifting, config), compared, drifting)
    return Comparison(
        (num_preempted, fitted.num_preemptions, corrected.num_preemptions),
        (
            _mean_latency(served, compared),
            float(fitted.latencies_s.mean()) + outside_s,
            float(corrected.latencies_s.mean()) + outside_s,
        ),
        (float(np.mean(seconds)), *np.percentile(seconds, (10, 90)).tolist()),
        _costs_us(worker),
        1_000 * outside_s,
    )


def _requests(
    count: int, rate: float, random: np.random.Generator, first_id: int
) -> list[SimRequest]:
    arrivals = np.cumsum(random.exponential(1 / rate, count)).tolist()
    prompts = random.integers(*_PROMPTS, count).tolist()
    outputs = random.integers(*_OUTPUTS, count).tolist()
    return [
        SimRequest(first_id + number, *lengths)
        for number, lengths in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def _flags(config: PageStreamConfig, num_blocks: int) -> list[str]:
    return [
        *("--num-blocks", str(num_blocks), "--block-size", str(config.block_size)),
        *("--num-host-blocks", "0", "--preemption", config.preemption),
        *("--max-num-sequences", str(config.max_num_sequences)),
        *("--max-num-batched-tokens", str(config.max_num_batched_tokens)),
        *("--max-plans-in-flight", str(config.max_plans_in_flight)),
        *("--watermark", str(config.watermark)),
    ]


def _alone_s(worker: FittedWorker) -> float:
    """Seconds of a request of one token inside the engine."""
    found = run(PageStream(worker, _CONFIG), [SimRequest(0, 0.0, 32, 1)], worker)
    return float(found.latencies_s[0])


def _mean_latency(served: Sequence[Served], requests: Sequence[SimRequest]) -> float:
    for found, request in zip(served, requests, strict=True):
        if found.num_tokens != request.output_tokens:
            raise PageStreamError(
                f"request {request.id} got {found.num_tokens} tokens of {request.output_tokens}"
            )
    return float(np.mean([found.latency_s for found in served]))


def _costs_us(worker: FittedWorker) -> tuple[float, ...]:
    *costs_s, context_s = worker.costs_s
    return (*(1e6 * cost for cost in costs_s), 1e9 * context_s)


def as_text(found: Comparison) -> str:
    """The results of one run as text."""
    iteration, prefill, decode, context = found.costs_us
    real, *simulated = found.preemptions
    real_s, *simulated_s = found.latencies_s
    lines = [f"{real} preemptions, mean latency {real_s:.3f} s"]
    mean, low, high = found.slowdowns
    speeds = ("as fitted", "at the machine's speed")
    for speed, number, seconds, ratio, latency_ratio in zip(
        speeds, simulated, simulated_s, found.preemption_ratios, found.latency_ratios, strict=True
    ):
        lines.append(
            f"    simulated, {speed}: {number} preemptions ({ratio:.2f}), {seconds:.3f} s "
            f"({latency_ratio:.2f})"
        )
    lines.append(
        f"    costs were {mean:.2f} times as high, {low:.2f} to {high:.2f} from second to second"
    )
    lines.append(
        f"    fitted: {iteration:.0f} us per iteration, {prefill:.1f} per prompt token, "
        f"{decode:.1f} per decoding sequence, {context:.1f} per 1,000 tokens attended to; "
        f"{found.outside_ms:.1f} ms per request outside of the engine"
    )
    return "\n".join(lines)


def main() -> None:
    """Compare and print; exits with 1 if the engine cannot be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=whole, default=200, help="of each run")
    add("--rate", type=positive, default=8.0, help="requests per second")
    add("--num-blocks", type=whole, default=96, help="of the pool")
    add("--runs", type=whole, default=3, help="each with other requests")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = []
    try:
        with Console(stderr=True).status("serving") as status:
            for seed in range(args.runs):
                status.update(f"run {seed + 1} of {args.runs}")
                found.append(compare(args.requests, args.rate, args.num_blocks, seed))
                if not args.json:
                    print(as_text(found[-1]), flush=True)
    except PageStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if args.json:
        print(json.dumps({"runs": [asdict(each) for each in found]}))
        return
    for name, index in (("as fitted", 0), ("at the machine's speed", 1)):
        preemptions = np.mean([each.preemption_ratios[index] for each in found])
        latency = np.mean([each.latency_ratios[index] for each in found])
        print(
            f"simulated to real, {name}: {preemptions:.2f} of the preemptions, "
            f"{latency:.2f} of the mean latency"
        )


if __name__ == "__main__":
    main()
