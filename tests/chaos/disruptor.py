"""Kills and pauses services at random times."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.cluster import GATEWAYS, Cluster

# With more at a time, two cores could not restart them: no service would ever be ready.
_MOST_DOWN = 2
_LONG_PAUSE_EVERY = 4
_SHORT_PAUSE_S = (0.2, 2.0)
_LONG_PAUSE_S = (5.5, 8.0)  # leases expire after 5 s
_LONGEST_PAUSE_S = 30.0  # once for each target
_LONGEST_AFTER = 2  # disruptions, at the latest
_SPAWNER_EVERY = 6


@dataclass(frozen=True, slots=True)
class Disruption:
    """One kill or pause, with its time on the monotonic clock."""

    service: str
    at_s: float
    paused_s: float = 0.0  # 0: killed
    with_spawner: bool = False  # killed together with its spawner


@dataclass(frozen=True, slots=True)
class Outage:
    """The time from a disruption until its service is ready again, on the monotonic clock.

    It is infinite if no test waited for that.
    """

    service: str
    from_s: float
    until_s: float


class Disruptor:
    """Kills or pauses services.

    Args:
        targets: names of services; empty: none; ``gateway`` is one of the gateways, ``worker`` one
            of the ranks.
        pauses: pause instead of kill.
        between_s: shortest and longest time between two disruptions, drawn for each.

    Attributes:
        disruptions: so far.
        outages: ended so far; at the end, all of them.
    """

    def __init__(
        self,
        cluster: Cluster,
        targets: Sequence[str],
        pauses: bool,
        between_s: tuple[float, float],
        draw: random.Random,
    ) -> None:
        self.disruptions: list[Disruption] = []
        self.outages: list[Outage] = []
        self._cluster = cluster
        self._targets = targets
        self._pauses = pauses
        self._between_s = between_s
        self._draw = draw
        self._down: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Disrupt services at random times until cancelled.

        A service is disrupted only when all earlier victims are ready again: the time to the next
        disruption begins then. Otherwise a service that starts slowly would never work.
        """
        try:
            while self._targets:
                victim = await self._choose()
                await asyncio.sleep(self._draw.uniform(*self._between_s))
                self.disrupt(victim)
        finally:
            for task in self._down.values():
                task.cancel()

    async def each_once(self, progress: Callable[[], int]) -> None:
        """Disrupt each target once, each time after ``progress`` has grown."""
        for target in self._targets:
            seen = progress()
            while progress() == seen:
                await asyncio.sleep(0.01)
            self.disrupt(self._draw.choice(self._cluster.names(target)))
        await asyncio.gather(*self._down.values())

    async def _choose(self) -> str:
        """Choose a service that is ready; waits for one."""
        while True:
            if sum(not task.done() for task in self._down.values()) >= _MOST_DOWN:
                await asyncio.sleep(0.05)
                continue
            target = self._draw.choice(self._targets)
            free = [name for name in self._cluster.names(target) if self._stands(name)]
            if free:
                return self._draw.choice(free)
            await asyncio.sleep(0.05)

    def _stands(self, name: str) -> bool:
        task = self._down.get(name)
        return task is None or task.done()

    def disrupt(self, name: str) -> None:
        """Kill or pause a service now."""
        if self._pauses:
            self._pause(name)
            return
        # Restarts with a spawner take seconds, and in practice it is mostly the service that dies.
        with_spawner = self._cluster.has_spawner(name) and not self._draw.randrange(_SPAWNER_EVERY)
        self._cluster.kill(name, with_spawner)
        self._down[name] = asyncio.create_task(self._restart(name, with_spawner))
        self.disruptions.append(Disruption(name, time.monotonic(), with_spawner=with_spawner))

    def _pause(self, name: str) -> None:
        pause_s = self._draw.uniform(*self._pause_lengths(name))
        pid = self._cluster.pause(name)
        if pid is not None:
            self._down[name] = asyncio.create_task(self._wake(name, pid, pause_s))
            self.disruptions.append(Disruption(name, time.monotonic(), pause_s))

    def _pause_lengths(self, name: str) -> tuple[float, float]:
        of_kind = [
            disruption
            for disruption in self.disruptions
            if _kind(disruption.service) == _kind(name)
        ]
        if len(of_kind) == _LONGEST_AFTER:
            return _LONGEST_PAUSE_S, _LONGEST_PAUSE_S
        is_long = len(self.disruptions) % _LONG_PAUSE_EVERY == _LONG_PAUSE_EVERY - 1
        return _LONG_PAUSE_S if is_long else _SHORT_PAUSE_S

    async def _restart(self, name: str, with_spawner: bool) -> None:
        from_s, until_s = time.monotonic(), math.inf
        try:
            await self._cluster.back(name, with_spawner)
            until_s = time.monotonic()
        finally:
            self.outages.append(Outage(name, from_s, until_s))

    async def _wake(self, name: str, pid: int, after_s: float) -> None:
        from_s = time.monotonic()
        try:
            await asyncio.sleep(after_s)
        finally:
            self._cluster.go_on(pid)
            self.outages.append(Outage(name, from_s, time.monotonic()))


def _kind(name: str) -> str:
    return "gateway" if name in GATEWAYS else name
