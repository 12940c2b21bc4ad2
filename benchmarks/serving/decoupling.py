"""Measures what a step costs because model, scheduler and gateway are processes joined by logs.

    python -m benchmarks.serving.decoupling --model FOLDER [--concurrency 1,16,64] [--json]

The same model executes the same plans twice: live, as they come from a scheduler through Redis,
with results published and all other processes on the same cores; and then in a plain loop of this
process, without publishing. Both are timed from the end of a step to the end of the next, in steps
in which all sequences decode and nothing else happens. ``bus`` is with Redis and the scheduler
alone, ``http`` with the gateway and its streaming clients as well. Live runs and loops alternate,
and the medians of their steps are compared.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.micro.no_observer import NoObserver
from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.serving.http_stream import StreamFailed, Target, ask
from benchmarks.serving.launched_services import answering
from benchmarks.serving.server_process import end
from deploy.redis.ports import free_port
from deploy.redis.server import Endpoint, configure, find_redis_server
from gpu_worker.model.loader import choose_device
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.step.compute_thread import compute_thread
from gpu_worker.step.executor import Executor
from shared.bus.api import Append
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.codec import decode_as, encode
from shared.messages.leases import EngineInfo, EngineState
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from shared.sampling import SamplingParams

_ENGINE = "engine-0"
_GATEWAY = "benchmark"
_LEASE_MS = 3_600_000
_POLL_S = 0.1
_PROMPT = 128
_OUTPUT = 128


@dataclass(frozen=True, slots=True)
class Step:
    """One executed step."""

    plan: StepPlan
    num_rows: int
    ended_s: float


class TimedExecutor:
    """Executes plans and records them with their times."""

    def __init__(self, executor: Executor, num_sequences: int) -> None:
        self.steps: list[Step] = []
        self.all_ended = threading.Event()
        self._num_left = num_sequences
        self._executor = executor

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step."""
        result = self._executor.execute(plan)
        self.steps.append(Step(plan, len(result.handles), time.perf_counter()))
        self._num_left -= len(result.ended_rows)
        if self._num_left == 0:
            self.all_ended.set()
        return result

    def reset(self) -> None:
        """Drop all sequences."""
        self._executor.reset()


class Stage:
    """Runs of one worker, live and in a loop.

    Args:
        url: of Redis.
        gateway_url: None: without a gateway.
    """

    def __init__(self, worker: Worker, settings: WorkerSettings, url: str, gateway_url: str | None):
        self._worker = worker
        self._url = url
        self._gateway_url = gateway_url
        self._thread = compute_thread(choose_device(settings.device))
        self._num_runs = 0
        self._epoch = 0  # of the last run

    def close(self) -> None:
        """End the compute thread; there must be no further run."""
        self._thread.shutdown()

    async def live(self, concurrency: int) -> list[Step]:
        """The steps of ``concurrency`` requests that begin together."""
        bus = RedisBus(self._url)
        await answering(bus)
        timed = TimedExecutor(self._worker.executor, concurrency)
        worker = self._worker
        service = WorkerService(
            bus,
            _ENGINE,
            timed,
            worker.model,
            worker.executor.limits.kv,
            worker.speeds,
            NoObserver(),
            thread=self._thread,
        )
        running = asyncio.create_task(service.run())
        self._num_runs += 1
        try:
            if self._gateway_url is None:
                # Without a lease the gateway would count as dead, and its requests would be
                # dropped.
                await bus.put(EngineKeys(_ENGINE).gateway(_GATEWAY), b"1", _LEASE_MS)
                data = [encode(_submit(self._num_runs, number)) for number in range(concurrency)]
                await bus.append(Append(EngineKeys(_ENGINE).requests, data))
                await asyncio.to_thread(timed.all_ended.wait)
            else:
                self._epoch = await _epoch_after(bus, self._epoch)
                await _ready(self._gateway_url)
                await _send_load(self._gateway_url, concurrency)
        finally:
            service.stop()
            await running
            await bus.close()
        return timed.steps

    def loop(self, plans: Sequence[StepPlan]) -> list[Step]:
        """Execute these plans in a loop; their steps."""
        timed = TimedExecutor(self._worker.executor, 0)
        timed.reset()

        def execute_all() -> None:
            for plan in plans:
                timed.execute(plan)

        self._thread.submit(execute_all).result()
        return timed.steps


def decode_s(steps: Sequence[Step], concurrency: int) -> list[float]:
    """Seconds from the end of a step to that of the next, for steps of decodes alone."""
    found = []
    for before, step in pairwise(steps):
        if all(
            each.num_rows == concurrency and _only_decodes(each.plan) for each in (before, step)
        ):
            found.append(step.ended_s - before.ended_s)
    return found


def _only_decodes(plan: StepPlan) -> bool:
    return not (len(plan.chunk_handles) or plan.admissions)


def _submit(run: int, number: int) -> Submit:
    rng = np.random.default_rng((run, number))
    prompt = rng.integers(300, 1_000, _PROMPT).astype(np.int32)
    sampling = SamplingParams.greedy(_OUTPUT)
    return Submit(f"r{run}-{number}", _GATEWAY, "a", prompt, sampling, 0, 1, 0, "")


async def _epoch_after(bus: RedisBus, epoch: int) -> int:
    """The epoch in which this run's worker serves; waits until it differs from the last run's."""
    while True:
        data = await bus.get(EngineKeys(_ENGINE).info)
        if data is not None:
            info: EngineInfo = decode_as(EngineInfo, data)
            if info.state == EngineState.READY and info.epoch > epoch:
                return info.epoch
        await asyncio.sleep(_POLL_S)  # polling interval of the condition


async def _ready(url: str) -> None:
    while True:
        try:
            await ask(Target.of(url, "/health/ready", None), None)
            return
        except StreamFailed:
            await asyncio.sleep(_POLL_S)  # polling interval of the condition


async def _send_load(url: str, concurrency: int) -> None:
    flags = ["--base-url", url, "--concurrency", str(concurrency), "--runs", "1", "--warmup", "0"]
    flags += ["--prompt-tokens", str(_PROMPT), "--output-tokens", str(_OUTPUT)]
    command = [sys.executable, "-m", "benchmarks.serving.load", *flags]
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=null)
    if await process.wait():
        raise StreamFailed("the load failed")


@contextmanager
def _processes(model: str, with_gateway: bool) -> Iterator[tuple[str, str | None]]:
    """Run Redis, a scheduler and perhaps a gateway; the URLs of Redis and of the gateway."""
    with tempfile.TemporaryDirectory() as folder:
        port, gateway_port = free_port(), free_port()
        url = f"redis://127.0.0.1:{port}/0"
        environ = {**os.environ, "REDIS_URL": url}
        commands = [[sys.executable, "-m", "scheduler_svc", "--scheduler-metrics-port", "0"]]
        if with_gateway:
            flags = ["--model", model, "--port", str(gateway_port)]
            commands.append([sys.executable, "-m", "gateway", *flags])
        redis = configure(find_redis_server(), Endpoint(None, port), Path(folder))
        with ExitStack() as started:
            started.callback(end, subprocess.Popen(redis, stdout=subprocess.DEVNULL))
            for command in commands:
                service = subprocess.Popen([*command, "--log-level", "error"], env=environ)
                started.callback(end, service)
            yield url, f"http://127.0.0.1:{gateway_port}" if with_gateway else None


def measure(
    worker: Worker, settings: WorkerSettings, concurrency: int, rounds: int, with_gateway: bool
) -> dict[str, float]:
    """Milliseconds of a step, live and in a loop, and the overhead of live steps in percent."""
    live: list[float] = []
    loop: list[float] = []
    with _processes(settings.model, with_gateway) as (url, gateway_url):
        stage = Stage(worker, settings, url, gateway_url)
        try:
            for number in range(rounds + 1):
                steps = uvloop.run(stage.live(concurrency))
                again = stage.loop([step.plan for step in steps])
                if number:  # the first round warms up
                    live += decode_s(steps, concurrency)
                    loop += decode_s(again, concurrency)
        finally:
            stage.close()
    live_ms, loop_ms = 1e3 * np.median(live), 1e3 * np.median(loop)
    return {
        "steps": float(len(live)),
        "loop_ms": float(loop_ms),
        "live_ms": float(live_ms),
        "added_percent": float(100 * (live_ms / loop_ms - 1)),
        "loop_mean_ms": float(1e3 * np.mean(loop)),
        "live_mean_ms": float(1e3 * np.mean(live)),
    }


def main() -> None:
    """Measure and print one line per case, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--concurrency", default="1,16,64", help="sequences that decode")
    parser.add_argument("--through", default="bus,http", help="bus: without a gateway")
    parser.add_argument("--rounds", type=int, default=3, help="live runs, each with its loop")
    parser.add_argument("--kv-memory-bytes", type=int, default=2**30, help="size of the pool")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    settings = WorkerSettings(
        model=args.model, kv_memory_bytes=args.kv_memory_bytes, host_kv_memory_bytes=0
    )
    worker = build_worker(settings)
    found: dict[str, dict[str, float]] = {}
    for through in args.through.split(","):
        for concurrency in map(int, args.concurrency.split(",")):
            name = f"{through} {concurrency}"
            print(f"{name} ...", file=sys.stderr)
            result = measure(worker, settings, concurrency, args.rounds, through == "http")
            found[name] = result
            if not args.json:
                print(
                    f"{name:<10} a step takes {result['loop_ms']:.2f} ms in a loop, "
                    f"{result['live_ms']:.2f} ms live: {result['added_percent']:+.1f} % "
                    f"({result['steps']:.0f} steps)"
                )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
