"""A run of all clients against a cluster, undisturbed or not."""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.client import Client, Outcome
from tests.chaos.cluster import Cluster
from tests.chaos.disruptor import Disruption, Disruptor
from tests.chaos.http_stream import Broken, ask
from tests.chaos.workload import Ask

# A gap between tokens belongs to a disruption if it ends within this time after it, because tokens
# in flight arrive after the disruption.
_AROUND_S = 0.5
_SCRAPE_S = 0.5
_COUNTER = re.compile(r'num_preemptions(?:_total)?\{.*kind="(\w+)".*\} ([\d.e+]+)')


@dataclass(frozen=True, slots=True)
class Scenario:
    """The targets and kinds of disruptions in one run.

    Attributes:
        targets: services that may be disrupted; ``gateway`` is one of the gateways.
        pauses: whether services are paused instead of killed.
        pressure: whether blocks are so few that requests are preempted all the time.
    """

    name: str
    targets: Sequence[str] = ()
    pauses: bool = False
    pressure: bool = False

    @property
    def plain_clients_live(self) -> bool:
        """Whether no gateway is disrupted, so that a stream need not be resumed."""
        return "gateway" not in self.targets


@dataclass(slots=True)
class Run:
    """The results of a run.

    Attributes:
        outcomes: by the key of the request.
        preemptions: by kind, as the scheduler reported before it died.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    disruptions: list[Disruption] = field(default_factory=list)
    preemptions: dict[str, float] = field(default_factory=dict)
    num_begun: int = 0
    num_tokens: int = 0
    time_s: float = 0.0

    @property
    def num_complete(self) -> int:
        """Requests whose answers are complete."""
        return sum(outcome.is_complete for outcome in self.outcomes.values())

    def pauses_s(self, with_spawner: bool) -> list[float]:
        """For each disruption and each stream that was open then, the longest silence around it.

        Beam searches send nothing before their end, and are left out.

        Args:
            with_spawner: of disruptions to services with their spawners, or of all others.
        """
        found = []
        for disruption in self.disruptions:
            if disruption.with_spawner is not with_spawner:
                continue
            until_s = disruption.at_s + _AROUND_S
            for outcome in self.outcomes.values():
                times = outcome.arrivals_s
                if outcome.ask.is_search or not times[0] <= disruption.at_s < times[-1]:
                    continue
                pairs = itertools.pairwise(times)
                found.append(max(b - a for a, b in pairs if b > disruption.at_s and a < until_s))
        return sorted(found)


async def run_clients(
    cluster: Cluster,
    asks: Sequence[Sequence[Ask]],
    label: str,
    plain_clients_live: bool,
    limit_s: float,
    deadline_s: float,
    run: Run,
) -> None:
    """Let every client send one request after the other, until all are done or the time is up.

    Args:
        limit_s: no request is sent after it.
        deadline_s: for each answer.
        run: filled in during the run.
    """
    began_s = time.monotonic()

    async def client(index: int) -> None:
        for number, what in enumerate(asks[index]):
            if time.monotonic() - began_s >= limit_s:
                return
            resumes = not (plain_clients_live and index % 2)
            first = index + number
            run.num_begun += 1
            one = Client(what, label, cluster.ports, resumes, first, deadline_s)
            run.outcomes[what.key] = one.outcome
            await one.run()

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(asks)):
                tasks.create_task(client(index))
    finally:
        run.time_s = time.monotonic() - began_s


async def disturbed(
    cluster: Cluster, clients: Awaitable[None], disruptor: Disruptor, run: Run, once: bool = False
) -> None:
    """Run clients, and disrupt services meanwhile.

    Args:
        once: each target is disrupted once.
    """
    run.disruptions = disruptor.disruptions
    disruptions = disruptor.each_once(lambda: num_arrivals(run)) if once else disruptor.run()
    tasks = [asyncio.create_task(disruptions), asyncio.create_task(count_preemptions(cluster, run))]
    try:
        await clients
        if once:
            await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def num_arrivals(run: Run) -> int:
    """Number of tokens that arrived in any stream."""
    return sum(len(outcome.arrivals_s) - 1 for outcome in run.outcomes.values())


async def count_preemptions(cluster: Cluster, run: Run) -> None:
    """Sum of the scheduler's counters, which begin anew with each of its processes."""
    last: Mapping[str, float] = {}
    while True:
        now = await _preemptions(cluster.metrics_port)
        for kind, count in now.items():
            before = last.get(kind, 0.0)
            more = count - before if count >= before else count
            run.preemptions[kind] = run.preemptions.get(kind, 0.0) + more
        last = now or last
        await asyncio.sleep(_SCRAPE_S)


async def _preemptions(port: int) -> Mapping[str, float]:
    try:
        async with asyncio.timeout(1.0), ask(port, "/metrics") as response:
            text = (await response.body()).decode()
    except (Broken, TimeoutError):
        return {}
    return {kind: float(value) for kind, value in _COUNTER.findall(text)}
