"""``scripts/soak``: hours of misbehaving clients and dying services, in minutes; nothing may leak.

Each minute is work, then silence. When all is silent, no block may be in use, and the resources of
every process and of Redis are recorded. In the first part of the time any service may be killed; in
the second only one of the two gateways, so that growth of the others shows. With ``--hostile`` some
clients attack, and others must not be affected.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.settings import REPOSITORY
from shared.settings import byte_size
from tests.chaos.client import Client
from tests.chaos.cluster import Cluster, NotReady
from tests.chaos.disruptor import Disruptor
from tests.chaos.hostile.__main__ import chosen
from tests.chaos.hostile.catalogue import ATTACKS
from tests.chaos.hostile.soak import HostileSoak, Plan
from tests.chaos.soak.clients import leave_early, read_slowly
from tests.chaos.soak.rest import rest
from tests.chaos.soak.verdict import Sample, growth, leaks, shown
from tests.chaos.workload import Ask, make_asks

_ROUND_S = 60.0
_WORK_SHARE = 0.7  # share of each minute
_KILLING_SHARE = 0.4  # share of the time in which any service may be killed
_ANY = ("scheduler", "worker", "gateway", "redis")
_CLIENTS, _LEAVING, _SLOW = 3, 4, 4
_RETENTION = 500
_ASKS = 1_000  # more than a client can send in a minute
_ANSWER_DEADLINE_S = 120.0
_SETTINGS = {
    "PAGESTREAM_NUM_BLOCKS": "192",  # few, so that all of them are used in the first minute
    "PAGESTREAM_NUM_HOST_BLOCKS": "32",
    "PAGESTREAM_OUTPUTS_RETENTION": str(_RETENTION),
    "PAGESTREAM_PLANS_RETENTION": str(_RETENTION),
    "PAGESTREAM_RESUME_WINDOW": "5",  # streams without a reader end soon
    "PAGESTREAM_GATEWAY_GRACE": "5",
    "PAGESTREAM_WRITE_TIMEOUT": "10",
}


class Soak:
    """One run.

    Args:
        folder: for logs and the report.
        minutes: duration.
        seed: of the requests and of the killed services.
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
        """Faults, as sentences."""
        return [
            *leaks(self.samples, _RETENTION),
            *(f"an answer was lost: {why}" for why in self.lost),
            *(f"died by itself: {death}" for death in self.deaths),
        ]

    async def run(self) -> None:
        """Run for the whole time."""
        model = REPOSITORY / "models" / "demo"
        async with Cluster(self._folder / "services", model, _SETTINGS) as cluster:
            self._began_s = time.monotonic()
            number = 0
            while self._at_min < self._minutes:
                targets = _ANY if self._at_min < _KILLING_SHARE * self._minutes else ("gateway-2",)
                await self._work(cluster, number, targets)
                self.samples.append(await rest(cluster, self._began_s))
                self.deaths = list(cluster.deaths)
                _show(self._news())
                number += 1

    async def _work(self, cluster: Cluster, number: int, targets: tuple[str, ...]) -> None:
        """Run one minute's work: wait for the patient clients, cut off the others."""
        until_s = time.monotonic() + _WORK_SHARE * _ROUND_S
        draw = self._draw
        between_s = (3.0, 12.0) if targets == _ANY else (10.0, 20.0)
        disruptor = Disruptor(cluster, targets, False, between_s, draw)
        unruly: list[Callable[..., Awaitable[None]]] = [leave_early] * _LEAVING
        unruly += [read_slowly] * _SLOW
        tasks = [asyncio.ensure_future(disruptor.run())]
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
        self._count("kills", len(disruptor.disruptions))

    async def _answered(
        self, cluster: Cluster, asks: Sequence[Ask], label: str, index: int, until_s: float
    ) -> None:
        """Send requests that must all be answered in full."""
        for number, what in enumerate(asks):
            if time.monotonic() >= until_s:
                return
            one = Client(what, label, cluster.ports, True, index + number, _ANSWER_DEADLINE_S)
            outcome = await one.run()
            self._count("answered", 1)
            if not outcome.is_complete or outcome.num_duplicates or outcome.num_gaps:
                self.lost.append(f"{label}-{what.key}: {outcome.why} {outcome.problems[-3:]}")

    def _news(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{shown(self.samples[-1])}; {counts}; {len(self.lost)} lost"

    def _count(self, what: str, more: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + more

    def report(self) -> dict[str, Any]:
        """All results, for a file."""
        return {
            "found": self.found(),
            "counts": self.counts,
            "processes": growth(self.samples),
            "samples": [asdict(sample) for sample in self.samples],
        }


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0)
    add("--seed", type=int, default=1)
    default = str(REPOSITORY / ".pagestream" / "soak")
    add("--out", default=default, help="folder for logs and the report")
    add("--hostile", action="store_true", help="honest clients beside hostile ones")
    hostile = parser.add_argument_group("with --hostile")
    add = hostile.add_argument
    add("--redis-memory", type=_bytes, default="256MB", help="most that Redis may use [256MB]")
    add("--num-blocks", type=int, default=192, help="of the KV pool [192]")
    add(
        "--attacks",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only those with such a word in their names",
    )
    add("--list-attacks", action="store_true", help="print the names of all attacks")
    add("--no-disruptions", action="store_true", help="no service is killed or paused")
    add("--delete-outputs", action="store_true", help="delete the outputs log now and then")
    add("--fill-redis", action="store_true", help="Redis is full for seconds of every round")
    options = parser.parse_args()
    try:
        chosen(options.attacks)
    except ValueError as error:
        parser.error(f"--attacks: {error}; --list-attacks prints them")
    return options


def _bytes(text: str) -> int:
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _soak(options: argparse.Namespace, folder: Path) -> Soak | HostileSoak:
    if not options.hostile:
        return Soak(folder, options.minutes, options.seed)
    plan = Plan(
        minutes=options.minutes,
        seed=options.seed,
        redis_bytes=options.redis_memory,
        num_blocks=options.num_blocks,
        attacks=options.attacks,
        disrupts_services=not options.no_disruptions,
        deletes_outputs=options.delete_outputs,
        fills_redis=options.fill_redis,
    )
    return HostileSoak(folder, plan, _show)


async def _run(soak: Soak | HostileSoak) -> None:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await soak.run()


def main() -> int:
    """0 if nothing is wrong, 1 if something is, 130 if interrupted."""
    options = _options()
    if options.list_attacks:
        print(*(f"{attack.name}: {attack.attempt.__doc__}" for attack in ATTACKS), sep="\n")
        return 0
    folder = Path(options.out) / time.strftime("%Y%m%d-%H%M%S")
    soak, interrupted = _soak(options, folder), True
    _show(f"logs in {folder}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(_run(soak))
            interrupted = False
    except NotReady as error:
        _show(f"error: {error}")
        return 1
    return _write_report(soak.report(), folder / "report.json", interrupted)


def _write_report(report: dict[str, Any], path: Path, interrupted: bool) -> int:
    """Write the report to its file, and its summary to the terminal; the exit code."""
    path.write_text(json.dumps(report, indent=1))
    for process in report["processes"]:
        if process["mib_per_min"] is not None:
            sizes = "{first_mib:.1f} to {last_mib:.1f} MiB, {mib_per_min:+.3f} MiB a minute"
            _show(f"{process['service']}: {sizes.format(**process)}")
    for line in report["found"]:
        _show(f"found: {line}")
    _show(f"report in {path}; load {os.getloadavg()[0]:.1f}")
    if interrupted:
        _show("interrupted")
        return 130
    _show(f"failed: {len(report['found'])} findings" if report["found"] else "passed")
    return int(bool(report["found"]))


if __name__ == "__main__":
    sys.exit(main())
