"""Sends ten times more requests than can be served, and checks accepted and refused ones.

    python -m benchmarks.serving.overload [--seconds 60] [--factor 10] [--json FILE]

Starts all services with ``scripts/serve``, finds the rate that they sustain with as many clients as
sequences may run, then sends requests at 0.8 of it, at ``--factor`` times it, and at 0.8 of it
again, at random times and without waiting for answers. Refusals must come at once, with 429 and
Retry-After; accepted requests must not wait longer than the bounded queue allows. The memory of all
processes and of Redis is sampled every second.

``--max-waiting-requests`` bounds the wait of accepted requests, to about that number divided by the
rate; ``--max-num-sequences`` bounds how many share a step, and so the time between tokens.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.progress import show
from benchmarks.serving.http_stream import RawAnswer, StreamFailed, Target, exchange
from benchmarks.serving.latencies import read_answer, summarize
from benchmarks.serving.launched_services import SERVICES, service_pids, serving
from benchmarks.serving.load import Load
from benchmarks.serving.processes import held_by, kept_in_redis
from benchmarks.serving.server_process import NotServed
from deploy.redis.ports import free_port
from deploy.redis.server import private_endpoint

_NORMAL = 0.8  # of the sustainable rate
_SAMPLE_S = 1.0
_SHOWN = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "latency_ms_p50")
_LOAD = Load("completions", "demo", prompt_tokens=32, output_tokens=32)


@dataclass(slots=True)
class Phase:
    """The results of one rate.

    Attributes:
        answers: received, in the order of their ends.
        broken: reasons of requests without an answer.
    """

    name: str
    rate_per_s: float
    answers: list[RawAnswer] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """The phase in numbers."""
        streams = [read_answer(answer) for answer in self.answers if answer.status == 200]
        refused = [answer for answer in self.answers if answer.status == 429]
        times_ms = [1e3 * (answer.ended_s - answer.sent_s) for answer in refused]
        statuses = Counter(answer.status for answer in self.answers)
        return {
            "name": self.name,
            "rate_per_s": self.rate_per_s,
            "statuses": dict(statuses),
            "broken": dict(self.broken),
            "refused_ms_p50": float(np.percentile(times_ms, 50)) if times_ms else None,
            "refused_ms_p99": float(np.percentile(times_ms, 99)) if times_ms else None,
            "refused_without_retry_after": sum(r.retry_after_s is None for r in refused),
            **(summarize(streams, 0.0) if streams else {}),
        }


class Overload:
    """Load on running services.

    Args:
        port: of the gateway.
        folder: as given to the launcher.
        rng: for prompts and send times.
    """

    def __init__(self, port: int, folder: Path, rng: random.Random) -> None:
        self._target = Target.of(f"http://127.0.0.1:{port}", "/v1/completions", None)
        self._folder = folder
        self._rng = rng
        self.memory: list[dict[str, float]] = []  # MiB by process, each second, with the phase
        self.phase = "start"

    async def sustainable_rate(self, num_clients: int, seconds: float) -> float:
        """Requests per second of so many clients that each send one request after the other."""
        phase, until_s = Phase("calibration", 0.0), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until_s:
                await self._send(phase)

        began_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        num_served = sum(answer.status == 200 for answer in phase.answers)
        if not num_served:
            raise NotServed(f"no request was served: {dict(phase.broken)}")
        return num_served / (time.monotonic() - began_s)

    async def open_loop(self, name: str, rate_per_s: float, seconds: float) -> Phase:
        """Send at this rate without waiting, then wait for the last answer."""
        phase, self.phase = Phase(name, rate_per_s), name
        next_s = time.monotonic()
        until_s = next_s + seconds
        async with asyncio.TaskGroup() as tasks:
            while next_s < until_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks.create_task(self._send(phase))
                next_s += self._rng.expovariate(rate_per_s)
        return phase

    async def watch_memory(self) -> None:
        """Sample all memory until cancelled."""
        while True:
            self.memory.append({"phase": self.phase, **self._memory()})  # type: ignore[dict-item]
            await asyncio.sleep(_SAMPLE_S)

    async def _send(self, phase: Phase) -> None:
        try:
            phase.answers.append(await exchange(self._target, _LOAD.body(self._rng, 0)))
        except StreamFailed as error:
            phase.broken[str(error)[:100]] += 1

    def _memory(self) -> dict[str, float]:
        pids = service_pids(self._folder)
        found = {name: held_by(pid).rss_bytes / 2**20 for name, pid in pids.items()}
        with suppress(OSError):
            kept = kept_in_redis(private_endpoint(self._folder / "redis"), "engine-0")
            found |= {"redis data": kept.used_bytes / 2**20, "outputs entries": float(kept.outputs)}
        return found


async def measure(args: argparse.Namespace, port: int, folder: Path) -> dict[str, Any]:
    """Run all phases; the results as one object."""
    load = Overload(port, folder, random.Random(args.seed))
    await load.sustainable_rate(args.max_num_sequences, 3.0)  # warms up
    rate = await load.sustainable_rate(args.max_num_sequences, args.calibration_seconds)
    show(f"sustainable: {rate:.2f} requests a second")
    watching = asyncio.create_task(load.watch_memory())
    phases = []
    for name, factor in (
        ("before", _NORMAL),
        ("overload", args.factor),
        ("after", _NORMAL),
    ):
        phase = await load.open_loop(name, factor * rate, args.seconds)
        phases.append(phase.figures())
        show(f"{name}: {phases[-1]['statuses']} {phases[-1]['broken'] or ''}")
    load.phase = "end"
    await asyncio.sleep(2 * _SAMPLE_S)  # so that memory is sampled once without requests
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return {
        "sustainable_per_s": rate,
        "max_waiting_requests": args.max_waiting_requests,
        "max_num_sequences": args.max_num_sequences,
        "phases": phases,
        "memory": load.memory,
    }


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    names = ("rate/s", "200", "429", "other", *_SHOWN, "429 p50 ms", "429 p99 ms")
    lines = ["| phase | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for phase in found["phases"]:
        statuses = {int(status): count for status, count in phase["statuses"].items()}
        other = sum(count for status, count in statuses.items() if status not in (200, 429))
        other += sum(phase["broken"].values())
        cells = [f"{phase['rate_per_s']:.1f}"]
        cells += [str(count) for count in (statuses.get(200, 0), statuses.get(429, 0), other)]
        values = [phase.get(name) for name in (*_SHOWN, "refused_ms_p50", "refused_ms_p99")]
        cells += ["-" if value is None else f"{value:.0f}" for value in values]
        lines.append(f"| {phase['name']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_memory_lines(found["memory"])])


def _memory_lines(memory: list[dict[str, Any]]) -> Iterator[str]:
    yield "| MiB | before, last | overload, highest | overload, last | end |"
    yield "|---|---|---|---|---|"
    for name in (*SERVICES, "redis data", "outputs entries"):
        by_phase = {
            phase: [look[name] for look in memory if look["phase"] == phase and name in look]
            for phase in ("before", "overload", "end")
        }
        if all(by_phase.values()):
            over = by_phase["overload"]
            cells = (by_phase["before"][-1], max(over), over[-1], by_phase["end"][-1])
            yield f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"


def faults(found: dict[str, Any]) -> list[str]:
    """What is not as required, in sentences."""
    lines = []
    before, over, after = found["phases"]
    for phase in found["phases"]:
        bad = {s: n for s, n in phase["statuses"].items() if int(s) not in (200, 429)}
        if bad or phase["broken"]:
            lines.append(f"{phase['name']}: neither served nor refused: {bad} {phase['broken']}")
        if phase["refused_without_retry_after"]:
            lines.append(f"{phase['name']}: refusals without Retry-After")
    for phase in (before, after):
        if 429 in phase["statuses"]:
            lines.append(f"{phase['name']}: {phase['statuses'][429]} refused below the limit")
    if 429 not in over["statuses"]:
        lines.append("overload: nothing was refused")
    return lines


def main() -> int:
    """Measure and print; 1 if a request was neither served nor refused as required."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of each rate")
    add("--calibration-seconds", type=float, default=15.0)
    add("--factor", type=float, default=10.0, help="times the sustainable rate")
    add("--max-num-sequences", type=int, default=16)
    add("--max-waiting-requests", type=int, default=16)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    flags = [
        *("--max-num-sequences", str(args.max_num_sequences)),
        *("--max-waiting-requests", str(args.max_waiting_requests)),
    ]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with serving(Path(folder), port, flags):
                found = uvloop.run(measure(args, port, Path(folder)))
        except NotServed as error:
            show(f"failed: {error}")
            return 1
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    lines = faults(found)
    for line in lines:
        show(f"found: {line}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
