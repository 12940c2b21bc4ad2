"""The engines of a fleet that have one model, as one gateway sees them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from gateway.engine.client import EngineClient
from gateway.engine.engine_status import Engine
from gateway.fleet.routing import EngineLoad
from shared.bus.api import Bus
from shared.errors import SettingsError
from shared.logs import EventLog
from shared.messages.leases import EngineInfo
from shared.tasks import cancel_until_done

_log = EventLog("gateway.fleet.members")

Connect = Callable[[str, str], Bus]
"""Makes a bus to the Redis at a URL, for the engine with an id."""

MakeClient = Callable[[Bus, str, Callable[[str], None]], EngineClient]
"""Makes the client of an engine from its bus, its id, and what takes released requests."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine.

    Attributes:
        info: its last lease.
        seen_s: when that was read.
        load: for routing.
    """

    engine_id: str
    info: EngineInfo
    bus: Bus
    client: EngineClient
    task: "asyncio.Task[None]"
    seen_s: float
    load: EngineLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = EngineLoad(self.engine_id)

    @property
    def engine(self) -> Engine | None:
        """The engine if it can take requests."""
        status = self.client.status
        return status if isinstance(status, Engine) and not self.info.draining else None

    def saw(self, info: EngineInfo, now_s: float) -> None:
        """Take a new lease."""
        self.info, self.seen_s = info, now_s
        self.load.take_lease(info.num_running + info.num_waiting, info.num_waiting_tokens)


class Members:
    """Engines that come and go.

    Args:
        connect: makes buses.
        make_client: makes clients.
        on_released: takes the id of an engine, and of a request that it hands over.
    """

    def __init__(
        self,
        connect: Connect,
        make_client: MakeClient,
        on_released: Callable[[str, str], None],
    ) -> None:
        self._connect = connect
        self._make_client = make_client
        self._on_released = on_released
        self._refused: dict[str, str] = {}  # URLs that cannot be used, by engine
        self.by_id: dict[str, Member] = {}

    def update(self, leases: Mapping[str, EngineInfo], now_s: float) -> None:
        """Take leases; an engine that names no model yet does not join."""
        for engine_id, info in leases.items():
            member = self.by_id.get(engine_id)
            if member is None and info.model is not None:
                member = self._join(engine_id, info, now_s)
            if member is not None:
                self.by_id[engine_id] = member
                member.saw(info, now_s)

    def ready(self) -> list[Member]:
        """Engines that can take requests."""
        return [member for member in self.by_id.values() if member.engine is not None]

    def silent(self, now_s: float, patience_s: float) -> list[Member]:
        """Engines without a lease for so long."""
        return [one for one in self.by_id.values() if now_s - one.seen_s >= patience_s]

    async def drop(self, member: Member) -> None:
        """Forget an engine."""
        _log.info("engine left", engine=member.engine_id)
        del self.by_id[member.engine_id]
        await _end(member)

    async def close(self) -> None:
        """Forget all engines."""
        members, self.by_id = list(self.by_id.values()), {}
        for member in members:
            await _end(member)

    def _join(self, engine_id: str, info: EngineInfo, now_s: float) -> Member | None:
        """The new member; None: the URL of its Redis cannot be used."""
        try:
            bus = self._connect(info.redis_url, engine_id)
        except SettingsError as error:
            if self._refused.get(engine_id) != info.redis_url:
                self._refused[engine_id] = info.redis_url
                _log.warning("engine not joined", engine=engine_id, error=error)
            return None
        on_released = partial(self._on_released, engine_id)
        client = self._make_client(bus, engine_id, on_released)
        task = asyncio.create_task(client.run(), name=f"engine {engine_id}")
        _log.info("engine joined", engine=engine_id)
        return Member(engine_id, info, bus, client, task, now_s)


async def _end(member: Member) -> None:
    await cancel_until_done(member.task)
    await member.bus.close()
