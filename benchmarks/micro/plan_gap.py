"""Measures how long a worker waits between two steps, with a model that computes nothing.

    python -m benchmarks.micro.plan_gap [--step-ms 2] [--sequences 64] [--json]

A real Redis, the real scheduler as a process, and the worker's real loop are used. Instead of a
model there is a wait of fixed length. The gap is the time from a result to the next plan.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.micro.no_observer import NoObserver
from benchmarks.micro.plain_result import plain_result
from benchmarks.serving.launched_services import answering
from benchmarks.serving.server_process import end
from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_redis_server
from gpu_worker.service import WorkerService
from shared.bus.api import Append
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.codec import IntArray, encode
from shared.messages.leases import KVGeometry, ModelInfo, Speeds
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from shared.sampling import SamplingParams

_ENGINE = "engine-0"
_PROMPT = 128
_OUTPUT = 400
_BUCKETS_US = (100, 200, 300, 400, 500, 750, 1_000, 2_000, 5_000)
_NONE: IntArray = np.empty(0, np.int32)


class NullExecutor:
    """Answers every plan with made-up tokens after a fixed time."""

    def __init__(self, step_s: float, num_sequences: int) -> None:
        self.gaps_s: list[float] = []
        self.all_ended = asyncio.Event()
        self._num_left = num_sequences
        self._step_s = step_s
        self._returned_s: float | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all sequences."""
        self._prompt_left: dict[int, int] = {}
        self._handles: IntArray = _NONE
        self._outputs = np.empty(0, np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a step, and record the time since the last one ended."""
        began = time.perf_counter()
        # Only steps of decodes alone: other steps take longer in any system.
        if self._returned_s is not None and not len(plan.chunk_handles):
            self.gaps_s.append(began - self._returned_s)
        for admission in plan.admissions:
            self._prompt_left[admission.handle] = len(admission.tokens)
        for handle, count in zip(
            plan.chunk_handles.tolist(), plan.chunk_tokens.tolist(), strict=True
        ):
            self._prompt_left[handle] -= count
            if self._prompt_left[handle] == 0:
                self._handles = np.append(self._handles, np.int32(handle))
                self._outputs = np.append(self._outputs, 0)
        self._outputs += 1
        ended = np.flatnonzero(self._outputs == _OUTPUT).astype(np.int32)
        result = plain_result(plan.step, self._handles, 7, ended)
        self._handles = np.delete(self._handles, ended)
        self._outputs = np.delete(self._outputs, ended)
        self._num_left -= len(ended)
        if self._num_left == 0:
            self.all_ended.set()
        # The sleep stands for the step: a computing device leaves the CPU to other processes too.
        while time.perf_counter() - began < self._step_s:
            time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        self._returned_s = time.perf_counter()
        return result


def _submit(number: int) -> Submit:
    sampling = SamplingParams.greedy(_OUTPUT)
    prompt = np.arange(number, number + _PROMPT, dtype=np.int32)
    return Submit(f"r{number}", "benchmark", "a", prompt, sampling, 0, 1, 0, "")


async def measure(url: str, step_s: float, num_sequences: int) -> np.ndarray:
    """Gaps of the steady part in seconds, [num_steps]."""
    bus = RedisBus(url)
    await answering(bus)
    executor = NullExecutor(step_s, num_sequences)
    model = ModelInfo("null", 32_000, 2_048, "none", ())
    kv = KVGeometry(num_sequences * 64, 16, 1, 0)
    worker = WorkerService(bus, _ENGINE, executor, model, kv, Speeds(1e6, 1e9), NoObserver())
    running = asyncio.create_task(worker.run())
    data = [encode(_submit(number)) for number in range(num_sequences)]
    await bus.append(Append(EngineKeys(_ENGINE).requests, data))
    await executor.all_ended.wait()
    worker.stop()
    await running
    await bus.close()
    return np.array(executor.gaps_s[20:])


def main() -> None:
    """Measure and print a histogram, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=2.0, help="length of a step")
    parser.add_argument("--sequences", type=int, default=64, help="sequences that decode")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        url = f"redis://127.0.0.1:{port}/0"
        redis = subprocess.Popen(
            configure(find_redis_server(), Endpoint(None, port), Path(folder)),
            stdout=subprocess.DEVNULL,
        )
        flags = ["--scheduler-metrics-port", "0", "--log-level", "error"]
        flags += ["--max-num-sequences", str(args.sequences)]
        flags += ["--max-num-batched-tokens", str(args.sequences + 1_024)]
        scheduler = subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc", *flags], env={**os.environ, "REDIS_URL": url}
        )
        try:
            gaps = uvloop.run(measure(url, args.step_ms / 1_000, args.sequences))
        finally:
            end(scheduler)
            end(redis)
    _report(1e6 * gaps, args.json)


def _report(gaps_us: np.ndarray, as_json: bool) -> None:
    edges = [0, *_BUCKETS_US, np.inf]
    counts, _ = np.histogram(gaps_us, edges)
    p50, p90, p99 = np.percentile(gaps_us, [50, 90, 99])
    if as_json:
        print(json.dumps({"steps": len(gaps_us), "p50_us": p50, "p90_us": p90, "p99_us": p99}))
        return
    print(f"{len(gaps_us)} steps; gap in us: median {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}")
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        print(f"{low:>6.0f} to {high:>6.0f} us {count:>6} {'#' * (60 * count // len(gaps_us))}")


if __name__ == "__main__":
    main()
