"""Processes of a deployment with what the simulation knows of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gateway.engine.client import EngineClient
from gateway.engine.event_queue import ClientDisconnected
from scheduler_svc.core import events
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observer import Observer
from scheduler_svc.settings import SchedulerSettings
from shared.messages.leases import KVGeometry
from shared.messages.outputs import StepResult
from shared.metrics import SchedulerMetrics
from tests.simulation.deployment.clients import Call, Stream
from tests.simulation.deployment.loop import Party
from tests.simulation.deployment.waiting import Waiting
from tests.simulation.profile import Profile


class Watching(Observer):
    """Knows the core of the scheduler that it observes."""

    core: Scheduler | None = None

    def __init__(
        self,
        metrics: SchedulerMetrics,
        clock_s: Callable[[], float],
        waiting: Waiting,
        too_much_waits: Callable[[str], None],
    ) -> None:
        super().__init__(metrics, clock_s)
        self._waiting = waiting
        self._too_much_waits = too_much_waits
        self.num_epochs = 0
        self.ended: set[str] = set()
        self.given_up: set[str] = set()  # pinned prefixes

    def new_epoch(self, epoch: int, kv: KVGeometry, core: Scheduler) -> None:
        self.num_epochs += 1
        self._waiting.clear()
        super().new_epoch(epoch, kv, core)

    def noted(self, taken: list[events.Event]) -> None:
        for event in taken:
            if isinstance(event, events.Ended):
                self.ended.add(event.request_id)
            elif isinstance(event, events.PrefixGivenUp):
                self.given_up.add(event.prefix_id)
        if (fault := self._waiting.too_much(taken)) is not None:
            self._too_much_waits(fault)
        super().noted(taken)

    def gauges(self, core: Scheduler, kv: KVGeometry):  # type: ignore[no-untyped-def]
        self.core = core
        return super().gauges(core, kv)


class Unwatched:
    """Metrics that are not read."""

    def __getattr__(self, name: str) -> "Unwatched":
        return self

    def __getitem__(self, name: str) -> "Unwatched":
        return self

    def __call__(self, *args: object) -> None:
        return None


class Silent:
    """A worker's metrics that are not measured."""

    def snapshot(self) -> None:
        pass

    def step(self, result: StepResult, snapshot: object, overhead_s: float | None) -> None:
        pass


class GatewayProcess:
    """A gateway with the calls that it serves."""

    def __init__(self, party: Party, engine: EngineClient) -> None:
        self.party = party
        self._engine = engine
        self._streams: list[Stream] = []

    def __str__(self) -> str:
        return self.party.name

    @property
    def num_left(self) -> int:
        """Requests that it still waits for."""
        return self._engine.num_open if self.party.is_running else 0

    def connect(self, stream: Stream) -> bool:
        if not self.party.is_dead:
            self._streams.append(stream)
        return not self.party.is_dead

    def serve(self, call: Callable[..., Call], stream: Stream, begin: str) -> None:
        self.party.spawn(call(self._engine, stream, begin).serve(begin))

    def put(self, stream: Stream, event: ClientDisconnected) -> None:
        asyncio.get_running_loop().call_soon(stream.queue.put, event, context=self.party.context)

    def reset_connections(self, rng: Random) -> None:
        """The process is gone; of what it sent, some still arrives."""
        for stream in self._streams:
            if not stream.is_broken:
                stream.break_off(rng.randint(0, len(stream.events)))
        self._streams.clear()


@dataclass(frozen=True, slots=True)
class SchedulerProcess:
    """A scheduler with what is known of its core."""

    party: Party
    watching: Watching


def scheduler_settings(profile: Profile) -> SchedulerSettings:
    """Settings of the schedulers of a run."""
    return SchedulerSettings(
        max_num_sequences=profile.max_num_sequences,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_plans_in_flight=profile.max_plans_in_flight,
        outputs_retention=profile.outputs_retention,
        outputs_retention_bytes=profile.outputs_retention_bytes,
        prefix_caching=profile.cache,
        preemption=profile.preemption,
        watermark=0.0,
        drain_timeout=profile.drain_timeout_s,
        max_waiting_requests=profile.max_waiting_requests,
        max_tenant_requests=profile.max_tenant_requests,
        max_tenant_tokens=profile.max_tenant_tokens,
        queue_ttl=profile.queue_ttl_s,
    )
