"""``scripts/soak --hostile``: honest clients beside hostile ones, while services die.

Each minute is work, then silence, as in the other soak. In the first part of the time services are
killed, and paused in every second round; later only one of the two gateways is killed.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.processes import redis_reply, redis_used_bytes
from deploy.settings import REPOSITORY
from shared.bus.keys import EngineKeys
from tests.chaos.cluster import GATEWAYS, Cluster
from tests.chaos.disruptor import Disruptor, Outage
from tests.chaos.hostile.__main__ import chosen
from tests.chaos.hostile.honest import HonestClients
from tests.chaos.hostile.verdict import Attempt, Record, found, report
from tests.chaos.probe import Wait
from tests.chaos.soak.rest import rest
from tests.chaos.soak.verdict import shown

_ROUND_S = 60.0
_WORK_SHARE = 0.7
_KILLING_SHARE = 0.4
_ANY = ("scheduler", "worker", "gateway", "redis")
_OFTEN_S, _RARELY_S = (6.0, 14.0), (10.0, 20.0)  # from one disruption to the next
_HONEST_TENANTS = ("anne", "emma", "harriet", "returning")
_TENANTS = (*_HONEST_TENANTS, "probe", "unusual", "mallory", "operator")
_OUTPUTS_RETENTION = 10_000  # the default
_WATCH_S = 0.5
_STOP_S = 10.0
_FILLER = "filler"
_FULL_S = 5.0
_BEYOND_LIMIT_BYTES = 64 * 2**10
_SETTINGS = {
    "PAGESTREAM_NUM_HOST_BLOCKS": "32",
    "PAGESTREAM_REQUEST_TIMEOUT": "15",
    "PAGESTREAM_WRITE_TIMEOUT": "10",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a hostile soak.

    Attributes:
        redis_bytes: Redis' ``maxmemory``, with ``noeviction``.
        num_blocks: of the KV pool.
        attacks: words in attacks' names; empty: all.
        disrupts_services: whether services are killed and paused.
        deletes_outputs: whether the outputs log is deleted once in some rounds, in which answers
            may end with an error.
        fills_redis: whether Redis is at its limit for a few seconds of every round.
    """

    minutes: float
    seed: int = 1
    redis_bytes: int = 256 * 2**20
    num_blocks: int = 192
    attacks: Sequence[str] = ()
    disrupts_services: bool = True
    deletes_outputs: bool = False
    fills_redis: bool = False
    round_s: float = _ROUND_S
    num_requests: int = 16  # of each honest client, the same in every round


class HostileSoak:
    """One run.

    Args:
        folder: for logs and the report.
        show: called with a line of progress now and then.

    Raises:
        ValueError: there is no attack with this name.
    """

    def __init__(self, folder: Path, plan: Plan, show: Callable[[str], None]) -> None:
        self._folder = folder
        self._plan = plan
        self._show = show
        self._draw = random.Random(plan.seed)
        self._keys = {name: f"{name}-{self._draw.getrandbits(128):032x}" for name in _TENANTS}
        names = [attack.name for attack in chosen(plan.attacks)]
        self.record = Record(names, _OUTPUTS_RETENTION, plan.redis_bytes)

    def found(self) -> list[str]:
        """Faults, as sentences."""
        return found(self.record)

    def report(self) -> dict[str, Any]:
        """All results, for a file."""
        return report(self.record) | {"samples": [asdict(one) for one in self.record.samples]}

    async def run(self) -> None:
        """Run for the whole time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        keys = self._folder / "api-keys.txt"
        digests = {name: hashlib.sha256(key.encode()) for name, key in self._keys.items()}
        lines = (f"{name} sha256:{digest.hexdigest()}\n" for name, digest in digests.items())
        keys.write_text("".join(lines))
        settings = _SETTINGS | {
            "PAGESTREAM_API_KEYS": str(keys),
            "PAGESTREAM_NUM_BLOCKS": str(self._plan.num_blocks),
        }
        limit = ("--maxmemory", str(self._plan.redis_bytes), "--maxmemory-policy", "noeviction")
        operator = {"Authorization": f"Bearer {self._keys['operator']}"}
        model = REPOSITORY / "models" / "demo"
        async with Cluster(self._folder / "services", model, settings, limit, operator) as cluster:
            watch = asyncio.create_task(self._watch_redis(cluster))
            try:
                async with self._probing(cluster):
                    await self._rounds(cluster)
            finally:
                watch.cancel()
                self.record.accidents += [f"died by itself: {death}" for death in cluster.deaths]

    async def _rounds(self, cluster: Cluster) -> None:
        ports, record = cluster.ports, self.record
        keys = [self._keys[name] for name in _HONEST_TENANTS]
        honest = HonestClients(ports, keys, self._plan.seed, self._plan.num_requests)
        record.honest = honest.seen
        await honest.undisturbed()
        self._show("every answer came undisturbed; the attacks begin")
        record.calm_until_s = began_s = time.monotonic()
        number = 0
        while (passed_s := time.monotonic() - began_s) < 60 * self._plan.minutes:
            is_early = passed_s < _KILLING_SHARE * 60 * self._plan.minutes
            await self._work(cluster, honest, number, is_early)
            record.samples.append(await rest(cluster, began_s))
            now_s = time.monotonic()
            record.outages = [
                replace(outage, until_s=min(outage.until_s, now_s)) for outage in record.outages
            ]
            self._show(self._news())
            number += 1

    async def _work(
        self, cluster: Cluster, honest: HonestClients, number: int, is_early: bool
    ) -> None:
        """Run one round's attacks and disruptions."""
        work_s = _WORK_SHARE * self._plan.round_s
        until_s = time.monotonic() + work_s
        targets: Sequence[str] = _ANY if is_early else ("gateway-2",)
        pauses = is_early and number % 2 == 1
        between_s = _OFTEN_S if is_early else _RARELY_S
        if not self._plan.disrupts_services:
            targets = ()
        deletes = self._plan.deletes_outputs and is_early
        disruptor = Disruptor(cluster, targets, pauses, between_s, self._draw)
        tasks = [asyncio.create_task(disruptor.run())]
        if deletes:
            tasks.append(asyncio.create_task(self._delete_outputs(cluster, work_s / 2)))
        if self._plan.fills_redis:
            tasks.append(asyncio.create_task(self._fill_redis(cluster, work_s / 4)))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._attack(cluster, number, work_s))
                group.create_task(honest.until(until_s, f"{number}", deletes))
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self.record.outages += disruptor.outages

    async def _attack(self, cluster: Cluster, number: int, seconds: float) -> None:
        """Run the attackers' process, and record its attempts."""
        attempts, complaints = (
            self._folder / f"attempts-{number}.{kind}" for kind in ("jsonl", "log")
        )
        words = ["--ports", *map(str, cluster.ports), "--seconds", str(seconds)]
        words += ["--seed", f"{self._plan.seed + number}"]
        words += ["--attacks", *self._plan.attacks]
        keys = {"HOSTILE_KEY": self._keys["mallory"], "HONEST_KEY": self._keys["unusual"]}
        with attempts.open("wb") as output, complaints.open("wb") as errors:
            command = [sys.executable, "-m", "tests.chaos.hostile", *words]
            code = await _finished(command, keys, output.fileno(), errors.fileno())
        if code:
            self.record.accidents.append(f"the attackers ended with {code}; see {complaints}")
        lines = attempts.read_text().splitlines()
        self.record.attempts += [Attempt(*json.loads(line)) for line in lines]

    @contextlib.asynccontextmanager
    async def _probing(self, cluster: Cluster) -> Any:
        """Run the probe inside the block."""
        waits, complaints = self._folder / "probe.jsonl", self._folder / "probe.log"
        words = ["--ports", *map(str, cluster.ports)]
        words += ["--pid-files", *(str(cluster.pid_file(name)) for name in GATEWAYS)]
        with waits.open("wb") as output, complaints.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.probe", *words),
                env=os.environ | {"PROBE_KEY": self._keys["probe"]},
                cwd=REPOSITORY,
                stdout=output.fileno(),
                stderr=errors.fileno(),
            )
        try:
            yield
        finally:
            if process.returncode is not None:
                end = f"the probe ended with {process.returncode}; see {complaints}"
                self.record.accidents.append(end)
            else:
                await _stopped(process)
            for line in waits.read_text().splitlines():
                parsed = json.loads(line)
                if "counts" in parsed:
                    self.record.num_questions = parsed["counts"]
                else:
                    self.record.waits.append(Wait(**parsed))

    async def _watch_redis(self, cluster: Cluster) -> None:
        """Record the peak of Redis' memory."""
        while True:
            with contextlib.suppress(OSError):  # it may have been killed
                used = await asyncio.to_thread(redis_used_bytes, cluster.redis)
                self.record.redis_peak_bytes = max(self.record.redis_peak_bytes, used)
                errors = await asyncio.to_thread(redis_reply, cluster.redis, "INFO errorstats")
                refused = re.search(r"errorstat_OOM:count=(\d+)", errors)
                if refused is not None:
                    self.record.redis_refusals = max(self.record.redis_refusals, int(refused[1]))
            await asyncio.sleep(_WATCH_S)

    async def _delete_outputs(self, cluster: Cluster, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(OSError):
            command = f"DEL {EngineKeys('engine-0').outputs}"
            await asyncio.to_thread(redis_reply, cluster.redis, command)
            self.record.num_deletions += 1

    async def _fill_redis(self, cluster: Cluster, after_s: float) -> None:
        """Keep Redis at its limit for a while, by an unused key."""
        await asyncio.sleep(after_s)
        from_s = time.monotonic()
        try:
            with contextlib.suppress(OSError):  # it may have been killed
                used = await asyncio.to_thread(redis_used_bytes, cluster.redis)
                num_bytes = max(0, self._plan.redis_bytes - used) + _BEYOND_LIMIT_BYTES
                command = f"SETRANGE {_FILLER} {num_bytes} x"
                await asyncio.to_thread(redis_reply, cluster.redis, command)
            await asyncio.sleep(_FULL_S)
        finally:
            # Shielded from cancellation: Redis would stay full otherwise.
            await asyncio.shield(_deleted(cluster, _FILLER))
            self.record.outages.append(Outage("redis", from_s, time.monotonic()))

    def _news(self) -> str:
        record, honest = self.record, self.record.honest
        return (
            f"{shown(record.samples[-1])}; peak {record.redis_peak_bytes / 2**20:.1f} MiB; "
            f"{len(record.attempts)} attempts, {len(record.outages)} outages, "
            f"{honest.answered} answered, {len(honest.lost)} lost, {len(honest.changed)} changed"
        )


async def _deleted(cluster: Cluster, key: str) -> None:
    """Delete a key as soon as Redis answers."""
    while True:
        try:
            await asyncio.to_thread(redis_reply, cluster.redis, f"DEL {key}")
        except OSError:
            await asyncio.sleep(_WATCH_S)
        else:
            return


async def _finished(
    command: Sequence[str], environ: Mapping[str, str], output: int, errors: int
) -> int:
    """Exit code of a process once it has ended; it is killed if this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environ, cwd=REPOSITORY, stdout=output, stderr=errors
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await _stopped(process)


async def _stopped(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
