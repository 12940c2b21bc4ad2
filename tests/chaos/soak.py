"""``scripts/soak``: hours of misbehaving clients and dying services, in minutes; nothing may leak.

Each minute is work, then silence. When all is silent, no block may be in use, and what every
process and Redis hold is noted. In the first part of the time any service may be killed; in the
second only one of the two gateways, so that one can tell whether the others grow.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.processes import Held, held_by, kept_in_redis
from deploy.settings import REPOSITORY
from tests.chaos.client import Client
from tests.chaos.cluster import SERVICES, Cluster, NotReady
from tests.chaos.http_stream import Broken, ask
from tests.chaos.mayhem import Mayhem
from tests.chaos.soak_clients import leave_early, read_slowly
from tests.chaos.soak_verdict import Sample, leaks, lives, slope_per_min
from tests.chaos.workload import make_asks

_ROUND_S = 60.0
_WORK_SHARE = 0.7  # of each minute
_IDLE_LIMIT_S = 90.0  # a service that was killed last must come back, and leases must run out
_KILLING_SHARE = 0.4  # of the time, in which any service may be killed
_ANY = ("scheduler", "worker", "gateway", "redis")
_CLIENTS, _LEAVING, _SLOW = 3, 4, 4
_RETENTION = 500
_ASKS = 1_000  # more than a client can put in a minute
_ANSWER_DEADLINE_S = 120.0
_SETTINGS = {
    "PAGESTREAM_NUM_BLOCKS": "192",  # all of them are touched in the first minute
    "PAGESTREAM_NUM_HOST_BLOCKS": "32",
    "PAGESTREAM_OUTPUTS_RETENTION": str(_RETENTION),
    "PAGESTREAM_RESUME_WINDOW": "5",  # streams without a reader end soon
    "PAGESTREAM_GATEWAY_GRACE": "5",
    "PAGESTREAM_WRITE_TIMEOUT": "10",
}


class Soak:
    """One run.

    Args:
        folder: for logs and the report.
        minutes: how long.
        seed: of what clients ask and who is killed.
    """

    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self._folder = folder
        self._minutes = minutes
        self._draw = random.Random(seed)
        self._seed = seed
        self._began_s = time.monotonic()
        self.samples: list[Sample] = []
        self.counts: dict[str, int] = {}
        self.lost: list[str] = []
        self.deaths: list[str] = []

    @property
    def _at_min(self) -> float:
        return (time.monotonic() - self._began_s) / 60

    def found(self) -> list[str]:
        """What is wrong, in words."""
        return [
            *leaks(self.samples, _RETENTION),
            *(f"an answer was lost: {why}" for why in self.lost),
            *(f"died by itself: {death}" for death in self.deaths),
        ]

    async def run(self) -> None:
        """Until the time is over."""
        model = REPOSITORY / "models" / "demo"
        async with Cluster(self._folder / "services", model, _SETTINGS) as cluster:
            self._began_s = time.monotonic()
            number = 0
            while self._at_min < self._minutes:
                targets = _ANY if self._at_min < _KILLING_SHARE * self._minutes else ("gateway-2",)
                await self._work(cluster, number, targets)
                self.samples.append(await self._silence(cluster))
                self.deaths = list(cluster.deaths)
                _say(self._news())
                number += 1

    async def _work(self, cluster: Cluster, number: int, targets: tuple[str, ...]) -> None:
        """One minute's work; who answers patiently is waited for, the others are cut off."""
        until_s = time.monotonic() + _WORK_SHARE * _ROUND_S
        draw = self._draw
        between_s = (3.0, 12.0) if targets == _ANY else (10.0, 20.0)
        mayhem = Mayhem(cluster, targets, False, between_s, draw)
        unruly: list[Callable[..., Awaitable[None]]] = [leave_early] * _LEAVING
        unruly += [read_slowly] * _SLOW
        tasks = [asyncio.ensure_future(mayhem.run())]
        for behave in unruly:
            own = random.Random(draw.getrandbits(64))
            tasks.append(asyncio.ensure_future(behave(cluster.ports, own, self.counts)))
        asks = make_asks(self._seed + number, _CLIENTS, _ASKS, (8, 64))
        try:
            async with asyncio.TaskGroup() as clients:
                for index in range(_CLIENTS):
                    clients.create_task(
                        self._answered(cluster, asks[index], f"{number}", index, until_s)
                    )
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._count("kills", len(mayhem.blows))

    async def _answered(
        self, cluster: Cluster, asks: list, label: str, index: int, until_s: float
    ) -> None:
        """Asks that must all be answered in full."""
        for number, what in enumerate(asks):
            if time.monotonic() >= until_s:
                return
            one = Client(what, label, cluster.ports, True, index + number, _ANSWER_DEADLINE_S)
            outcome = await one.run()
            self._count("answered", 1)
            if not outcome.is_complete or outcome.num_duplicates or outcome.num_gaps:
                self.lost.append(f"{label}-{what.key}: {outcome.why} {outcome.said[-3:]}")

    async def _silence(self, cluster: Cluster) -> Sample:
        """Wait until nothing runs, and look at everything."""
        began_s = time.monotonic()
        left = "nothing was seen"
        idle_after_s = None
        while time.monotonic() - began_s < _IDLE_LIMIT_S:
            left = await _what_runs(cluster)
            if not left:
                idle_after_s = time.monotonic() - began_s
                break
            await asyncio.sleep(0.25)
        processes = {name: held_by(_pid(cluster, name)) for name in SERVICES}
        redis = kept_in_redis(_redis_port(processes["redis"]), "engine-0")
        return Sample(self._at_min, processes, redis, idle_after_s, left)

    def _news(self) -> str:
        last = self.samples[-1]
        sizes = " ".join(
            f"{name} {held.rss_bytes / 2**20:.0f} MiB/{held.num_fds} fds"
            for name, held in last.processes.items()
        )
        kept = last.redis
        idle = "NOT IDLE" if last.idle_after_s is None else f"idle after {last.idle_after_s:.1f} s"
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        counts += f"; {len(self.lost)} lost"
        return (
            f"minute {last.at_min:4.1f}: {idle}; {sizes}; Redis data {kept.used_bytes / 2**20:.1f} "
            f"MiB, logs {kept.requests}/{kept.plans}/{kept.outputs}; {counts}"
        )

    def _count(self, what: str, more: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + more

    def report(self) -> dict:
        """Everything, for a file."""
        slopes = [
            {
                "service": name,
                "pid": life[0][1].pid,
                "minutes": life[-1][0] - life[0][0],
                "num_samples": len(life),
                "first_mib": life[0][1].rss_bytes / 2**20,
                "last_mib": life[-1][1].rss_bytes / 2**20,
                "mib_per_min": None if slope is None else slope / 2**20,
            }
            for name, life in lives(self.samples)
            for slope in [slope_per_min(life)]
        ]
        samples = [asdict(sample) for sample in self.samples]
        return {
            "found": self.found(),
            "counts": self.counts,
            "processes": slopes,
            "samples": samples,
        }


async def _what_runs(cluster: Cluster) -> str:
    """What is not idle, "" if all is."""
    try:
        async with asyncio.timeout(10):
            await cluster.all_ready()
        scheduler = await _metrics(cluster.metrics_port)
        gateways = [await _metrics(port) for port in cluster.ports]
    except (Broken, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    found = {
        "running": scheduler.get("num_requests_running", 1.0),
        "waiting": scheduler.get("num_requests_waiting", 1.0),
        "share of blocks used": scheduler.get("kv_cache_usage_perc", 1.0),
        "open streams": sum(metrics.get("open_streams", 1.0) for metrics in gateways),
    }
    return ", ".join(f"{what} {number:g}" for what, number in found.items() if number)


async def _metrics(port: int) -> dict[str, float]:
    async with asyncio.timeout(5), ask(port, "/metrics") as response:
        text = (await response.body()).decode()
    found = re.findall(r"^pagestream:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _pid(cluster: Cluster, name: str) -> int:
    pid = cluster.pid(name)
    assert pid is not None, f"{name} is ready, and has no process"
    return pid


def _redis_port(redis: Held) -> int:
    words = Path(f"/proc/{redis.pid}/cmdline").read_bytes().split(b"\0")
    # Redis writes its own title: "redis-server 127.0.0.1:PORT".
    found = re.search(rb"127\.0\.0\.1:(\d+)|--port\0(\d+)", b"\0".join(words))
    assert found is not None, words
    return int(found[1] or found[2])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    default = str(REPOSITORY / ".pagestream" / "soak")
    parser.add_argument("--out", default=default, help="folder for logs and the report")
    return parser.parse_args()


async def _run(soak: Soak) -> None:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await soak.run()


def main() -> int:
    """0 if nothing leaks, 1 if something does, 130 if interrupted."""
    options = _options()
    folder = Path(options.out) / time.strftime("%Y%m%d-%H%M%S")
    soak, interrupted = Soak(folder, options.minutes, options.seed), True
    _say(f"logs in {folder}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(_run(soak))
            interrupted = False
    except NotReady as error:
        _say(f"error: {error}")
        return 1
    report = soak.report()
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    for process in report["processes"]:
        if process["mib_per_min"] is not None:
            sizes = "{first_mib:.1f} to {last_mib:.1f} MiB, {mib_per_min:+.3f} MiB a minute"
            _say(f"{process['service']}: {sizes.format(**process)}")
    for line in report["found"]:
        _say(f"found: {line}")
    _say(f"report in {folder / 'report.json'}; load {os.getloadavg()[0]:.1f}")
    return 130 if interrupted else int(bool(report["found"]))


if __name__ == "__main__":
    sys.exit(main())
