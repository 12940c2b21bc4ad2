"""The processes of a deployment, and what happens to them."""

import asyncio
import math
import zlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from gateway.engine.client import EngineClient
from gpu_worker.ranks.member import GroupOver, Member
from scheduler_svc.service import SchedulerService, Superseded
from shared.bus.keys import EngineKeys
from shared.errors import BusUnavailable
from tests.simulation.deployment.allowances import Allowances
from tests.simulation.deployment.client import Client
from tests.simulation.deployment.connection import Connection
from tests.simulation.deployment.loop import Party, VirtualLoop
from tests.simulation.deployment.model import Model
from tests.simulation.deployment.processes import (
    GatewayProcess,
    SchedulerProcess,
    Unwatched,
    Watching,
    scheduler_settings,
)
from tests.simulation.deployment.ranks import Group, Meeting
from tests.simulation.deployment.server import Server
from tests.simulation.deployment.waiting import Waiting
from tests.simulation.deployment.workers import ENGINE, MODEL, run_worker
from tests.simulation.profile import Fault, Profile

_NUM_GATEWAYS = 2
_PATIENCE_S = 200.0
_APPEND_WEIGHT = 6  # faults at appends do more harm than at what is asked all the time
_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


class Link:
    """A party's network: faults are injected into commands and into their replies."""

    def __init__(self, world: "World", party: Party) -> None:
        self._world = world
        self._party = party
        self._random = world.rng.random
        self._latency_s = world.profile.latency_s

    def there_s(self) -> float:
        if self._world.is_over:
            raise BusUnavailable("the run has ended")
        slowness = 20 if self._random() < 0.02 else 1
        return -math.log(1.0 - self._random()) * slowness * self._latency_s

    def back_s(self) -> float:
        return 0.0 if self._random() < 0.7 else self.there_s()

    def inject(self, when: str, what: str) -> bool:
        return self._world.at_command(self._party, when, what)

    def wrote(self, what: str, is_refused: bool) -> None:
        said = f"{self._party.name} {what} {is_refused}"
        self._world.note(zlib.crc32(said.encode()))

    def repeats(self, log: str) -> bool:
        harmless = log.endswith(":requests") or self._party.role == "worker"
        return harmless and self._world.repeats()


Script = Callable[["World", Party, str, str], Fault | None]
"""(world, party, "before" or "after", command) -> the fault to inject now."""


class World:
    """All processes, the server and the clients.

    Args:
        script: decides about faults instead of chance.

    Attributes:
        allowances: what clients may lose.
        is_over: everything is taken down.
        over: set when no client waits any more, or one has come to harm.
        history: 64-bit hash of who wrote to which log, who was refused, and of all faults, in
            their order; reads and leases, and what was written, are no part of it.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        profile: Profile,
        trace: Callable[[str], None] | None = None,
        script: Script | None = None,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.profile = profile
        self.server = Server(loop)
        self.failures: list[str] = []
        self.num_faults = 0
        self.is_quiet = False
        self.history = 0
        self.over = asyncio.Event()
        self.is_over = False
        self.model = Model(rng, profile.end_share)
        self.schedulers: list[SchedulerProcess] = []
        self.leaving: list[Party] = []
        self.is_directed = script is not None
        self.gateways: list[GatewayProcess] = []
        self.clients: list[Client] = []
        self.parties: list[Party] = []
        self.allowances = Allowances(
            profile, self.server, self.model, self.parties, self.schedulers, self.clients
        )
        self.meeting = Meeting(
            lambda: Group(loop, self.model, profile.num_ranks, profile.max_num_batched_tokens)
        )
        self._metrics: Any = Unwatched()
        self._trace = trace
        self._script = script
        self.stops: dict[Party, Callable[[], None]] = {}
        self._num_started = 0
        self._accepted: set[str] = set()  # by any scheduler
        self._home = Party("none", 0, loop)

    def note(self, number: int) -> None:
        """Something happened that makes this run's history another one."""
        self.history = (self.history ^ number) * _PRIME & _MASK
        self.loop.mix(number)

    def trace(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.loop.time():10.4f} {text}")

    # --------------------------------------------------------------- processes

    def start(self) -> None:
        """One scheduler, the workers, two gateways and all clients."""
        apart_s = self.profile.apart_s
        for rank in range(1, self.profile.num_ranks):
            self.later(0.0, partial(self.start_worker, rank))
        starts = [self.start_worker, self.start_scheduler, *[self.start_gateway] * _NUM_GATEWAYS]
        for number, start in enumerate(starts):
            self.later(min(number, 2) * apart_s, start)
        for wish in self.profile.wishes:
            client = Client(
                wish,
                self.model,
                self.rng,
                lambda: [found for found in self.gateways if not found.party.is_dead],
                self.allowances.may_be_lost,
                self.trace,
                self.rng.random() < self.profile.is_slow,
                self._is_served_instead,
                self.profile.queue_ttl_s,
                self.loop.time,
            )
            self.clients.append(client)
            self._keep(self._home.spawn(client.run()), self._home)

    def start_scheduler(self) -> Party:
        party = self._party("scheduler")
        profile = self.profile
        waiting = Waiting(profile, self._accepted)
        observer = Watching(self._metrics, self.loop.time, waiting, self._too_much_waits)
        service = SchedulerService(
            self.bus_of(party),
            scheduler_settings(profile),
            observer,
            clock_s=self.loop.time,
        )
        self.schedulers.append(SchedulerProcess(party, observer))
        self.stops[party] = service.stop
        self._keep(party.spawn(service.run()), party)
        return party

    def start_worker(self, rank: int = 0, parent: str = "") -> Party:
        """Start a worker: of rank 0 "worker-…", of others "rank1-…" and so on.

        Args:
            parent: of a second process of the same rank; "": the first one's, which is dead then.
        """
        party = self._party(_role(rank))
        member = Member(rank, self.profile.num_ranks, parent=parent or party.role)
        self._keep(party.spawn(run_worker(self, party, member)), party)
        return party

    def start_gateway(self) -> Party:
        party = self._party("gateway")
        engine = EngineClient(
            self.bus_of(party),
            ENGINE,
            MODEL.name,
            party.name,
            self._metrics,
            self.profile.prefixes,
            patience_s=_PATIENCE_S,
        )
        self.gateways.append(GatewayProcess(party, engine))
        self._keep(party.spawn(engine.run()), party)
        return party

    def bus_of(self, party: Party) -> Connection:
        return Connection(self.server, Link(self, party), party, self.loop)

    def _party(self, role: str) -> Party:
        self._num_started += 1
        party = Party(f"{role}-{self._num_started}", self._num_started, self.loop)
        self.parties.append(party)
        self.trace(f"{party.name} starts")
        return party

    def _keep(self, task: "asyncio.Task[None]", party: Party) -> None:
        task.add_done_callback(lambda done: self._ended(done, party), context=self._home.context)

    def _ended(self, task: "asyncio.Task[None]", party: Party) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if party is self._home:
            if error is not None:
                self._fail(f"a client: {error!r}")
            if not self.clients_wait:
                self.over.set()
            return
        self.trace(f"{party.name} exits: {error!r}")
        if error is not None and not isinstance(error, (Superseded, BusUnavailable, GroupOver)):
            self._fail(f"{party.name}: {error!r}")
        self._bury(party)

    def _too_much_waits(self, fault: str) -> None:
        # What a lost tail has accepted is accepted again, whatever waits by then.
        if self.server.num_losses == 0:
            self._fail(fault)

    def _fail(self, failure: str) -> None:
        self.trace(f"FAILURE {failure}")
        self.failures.append(failure)
        self.over.set()

    # ------------------------------------------------------------------ faults

    def repeats(self) -> bool:
        """An append arrives twice."""
        return not self.is_quiet and self.rng.random() < self.profile.repeat_rate

    def at_command(self, party: Party, when: str, what: str) -> bool:
        """Whether a message gets through; faults may affect others, too."""
        if self.is_quiet:
            return True
        if self._script is not None:
            fault = self._script(self, party, when, what)
        else:
            fault = self._draw_fault(_APPEND_WEIGHT if "append" in what else 1)
        if fault is None:
            return True
        self.note(zlib.crc32(f"{fault} {when} {what} of {party.name}".encode()))
        self.trace(f"{fault} {when} {what} of {party.name}")
        if fault is Fault.LOST_REPLY:
            return when == "before"
        self.inject(fault, party)
        return True

    def _draw_fault(self, weight: int) -> Fault | None:
        profile = self.profile
        rate = weight * profile.fault_rate
        if self.num_faults >= profile.max_faults or self.rng.random() >= rate:
            return None
        is_time = profile.faults_from_s <= self.loop.time() <= profile.quiet_after_s
        if not is_time or not self.clients_wait:
            return None
        self.num_faults += 1
        return self.rng.choice(profile.faults)

    @property
    def clients_wait(self) -> bool:
        """Whether a client lacks tokens."""
        return not all(client.is_done for client in self.clients)

    def inject(self, fault: Fault, party: Party) -> None:
        """A fault that is more than a lost message."""
        rng = self.rng
        if fault in (Fault.CRASH, Fault.PAUSE) and rng.random() < 0.5:
            party = rng.choice([found for found in self.parties if found.is_running])
        match fault:
            case Fault.CRASH:
                self.crash(party, rng.choice(self.profile.restarts_s))
            case Fault.PAUSE:
                self.pause(party, rng.choice(self.profile.pauses_s))
            case Fault.OUTAGE:
                self.outage(rng.choice(self.profile.outages_s))
            case Fault.RESTART:
                self.restart_server(0, rng.choice(self.profile.restarts_s))
            case Fault.TAIL_LOSS:
                most = min(self.profile.max_lost_writes, self.server.num_writes)
                self.restart_server(rng.randint(0, most), rng.choice(self.profile.restarts_s))
            case Fault.DELETION:
                keys = EngineKeys(ENGINE)
                self.delete(rng.choice((keys.outputs, keys.plans, keys.requests, keys.prompts, "")))
            case Fault.RIVAL:
                num_ranks = self.profile.num_ranks
                rank = rng.randrange(num_ranks) if num_ranks > 1 else 0
                rng.choice((self.start_scheduler, partial(self.start_worker, rank, "rival")))()
            case Fault.MOVE:
                served = [client for client in self.clients if client.is_served]
                if served:
                    rng.choice(served).move()
            case Fault.LEAVE:
                if candidates := [found for found in self.stops if found.is_running]:
                    self.leave(rng.choice(candidates))

    def leave(self, party: Party) -> None:
        """SIGTERM."""
        self.trace(f"{party.name} is asked to leave")
        self.leaving.append(party)
        party.context.copy().run(self.stops[party])

    def _is_served_instead(self, client: Client) -> bool:
        """Of two that ask for the same, the later one is served, as long as there is one."""
        return any(
            other.request_id == client.request_id and not other.is_superseded
            for other in self.clients
            if other is not client
        )

    def crash(self, party: Party, restart_s: float) -> None:
        """The process is gone, from here on; another one starts after a while."""
        if party.is_dead:
            return
        self.trace(f"{party.name} dies")
        party.freeze()
        self._bury(party, restart_s)

    def _bury(self, party: Party, restart_s: float = 0.1) -> None:
        if party.is_dead:
            return
        party.is_dead = True
        for gateway in self.gateways:
            if gateway.party is party:
                gateway.reset_connections(self.rng)
        self.later(restart_s, lambda: self._replace(party.role))

    def _replace(self, role: str) -> None:
        """Some supervisor sees to it that there are enough."""
        count = sum(found.role == role and not found.is_dead for found in self.parties)
        starts: dict[str, Callable[[], Party]] = {
            _role(rank): partial(self.start_worker, rank) for rank in range(self.profile.num_ranks)
        }
        starts |= {"scheduler": self.start_scheduler, "gateway": self.start_gateway}
        if count < (_NUM_GATEWAYS if role == "gateway" else 1):
            starts[role]()

    def pause(self, party: Party, seconds: float) -> None:
        """The process does not run for a while."""
        if not party.is_running:
            return
        self.trace(f"{party.name} pauses for {seconds} s")
        party.freeze()
        self.later(seconds, lambda: self._wake(party))

    def _wake(self, party: Party) -> None:
        if not party.is_dead:
            self.trace(f"{party.name} wakes")
            party.thaw()

    def outage(self, seconds: float) -> None:
        """The server does not answer for a while."""
        if not self.server.is_away:
            self.trace(f"the server is away for {seconds} s")
            self.server.go_away()
            self.later(seconds, self._come_back)

    def restart_server(self, num_lost: int, seconds: float) -> None:
        """The server comes back without its last writes."""
        if self.server.is_away:
            return
        skew_ms = -self.rng.randint(0, self.profile.max_skew_ms) if num_lost else 0
        self.trace(f"the server restarts: {num_lost} writes lost, clock {skew_ms} ms")
        self.server.go_away()
        self.server.restart(num_lost, skew_ms)
        self.later(seconds, self._come_back)

    def delete(self, log: str) -> None:
        """An operator deletes a log, or all of them: ""."""
        self.trace(f"{log or 'everything'} is deleted")
        self.server.delete(log)

    def _come_back(self) -> None:
        self.trace("the server is back")
        self.server.come_back()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """An action of no party."""
        self.loop.call_later(seconds, action, context=self._home.context)


def _role(rank: int) -> str:
    return f"rank{rank}" if rank else "worker"
