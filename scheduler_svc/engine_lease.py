"""The engine's lease: in its own Redis, and in the directory of a fleet if there is one."""

from dataclasses import dataclass, replace

from scheduler_svc.core.events import Stats
from scheduler_svc.settings import SchedulerSettings
from shared.bus.api import Bus
from shared.bus.keys import EngineKeys, engine_lease
from shared.codec import encode
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.leases import (
    PROTOCOL,
    EngineInfo,
    EngineState,
    KVGeometry,
    ModelInfo,
    PrefixStatus,
    decode_lease,
)

_LEASE_MS = 5_000

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What changes in a lease from one time to the next."""

    state: EngineState
    detail: str = ""
    epoch: int = 0
    stats: Stats | None = None
    prefixes: tuple[PrefixStatus, ...] = ()
    stalled_ms: int = 0
    draining: bool = False


class EngineLease:
    """Publishes the state of an engine.

    Args:
        bus: of the engine.
        instance: of the scheduler.
        directory: of the fleet; None: there is none.

    Attributes:
        model: of the last worker that was ready.
        kv: its pools.
    """

    def __init__(
        self, bus: Bus, settings: SchedulerSettings, instance: str, directory: Bus | None
    ) -> None:
        self.model: ModelInfo | None = None
        self.kv: KVGeometry | None = None
        self._bus = bus
        self._directory = directory
        self._settings = settings
        self._instance = instance
        self._keys = EngineKeys(settings.engine_id)

    async def publish(self, report: EngineReport) -> None:
        """Renew the lease."""
        stats = report.stats
        info = EngineInfo(
            engine_id=self._settings.engine_id,
            scheduler=self._instance,
            epoch=report.epoch,
            state=report.state,
            detail=report.detail,
            model=self.model,
            kv=self.kv,
            max_num_sequences=self._settings.max_num_sequences,
            num_running=0 if stats is None else stats.num_running,
            num_waiting=0 if stats is None else stats.num_waiting,
            num_waiting_tokens=0 if stats is None else stats.num_waiting_tokens,
            prefixes=report.prefixes,
            stalled_ms=report.stalled_ms,
            draining=report.draining,
            protocol=PROTOCOL,
        )
        await self._bus.put(self._keys.info, encode(info), _LEASE_MS)
        if self._directory is not None:
            await self._publish_to(self._directory, info)

    async def has_other_engine(self) -> bool:
        """Whether another engine of the fleet can go on with this one's requests."""
        if self._directory is None or self.model is None:
            return False
        try:
            for engine_id in await self._directory.engines():
                data = await self._directory.get(engine_lease(engine_id))
                if data is None or engine_id == self._settings.engine_id:
                    continue
                try:
                    found = decode_lease(EngineInfo, data, f"scheduler of engine {engine_id!r}")
                except DecodeError:
                    continue  # its requests would have to be understood by both
                is_ready = found.state == EngineState.READY and not found.draining
                if is_ready and found.model is not None and found.model.name == self.model.name:
                    return True
        except BusUnavailable as error:
            log.warning("directory not read", error=error)
        return False

    async def _publish_to(self, directory: Bus, info: EngineInfo) -> None:
        """A directory that is away stops no engine."""
        engine_id = self._settings.engine_id
        url = self._settings.advertised_redis_url or self._settings.redis_url
        try:
            await directory.add_engine(engine_id)
            data = encode(replace(info, redis_url=url))
            await directory.put(engine_lease(engine_id), data, _LEASE_MS)
        except BusUnavailable as error:
            log.warning("directory not updated", error=error)
