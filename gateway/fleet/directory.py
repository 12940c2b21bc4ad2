"""The directory of a fleet: which engines there are, and which one a request belongs to."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.fleet.shared_routes import SharedRoutes
from shared.bus.api import Bus
from shared.bus.keys import engine_lease, kept_request, placement
from shared.codec import decode_as
from shared.errors import DecodeError
from shared.logs import EventLog
from shared.messages.leases import EngineInfo, decode_lease
from shared.messages.requests import Submit

PLACEMENT_MS = 24 * 3_600_000  # longer than any request is remembered
"""How long a placement is kept after it was written last."""

_log = EventLog("gateway.fleet.directory")


@dataclass(frozen=True, slots=True)
class Placement:
    """The engine that a request belongs to: no gateway delivers it from another.

    Attributes:
        generation: how many engines it has had; only grows.
    """

    engine_id: str
    generation: int = 1

    def encode(self) -> bytes:
        """As it stands in the directory."""
        return f"{self.generation} {self.engine_id}".encode()

    @staticmethod
    def decode(data: bytes) -> "Placement":
        """The placement that ``encode`` wrote.

        Raises:
            DecodeError: the bytes are none.
        """
        generation, _, engine_id = data.decode("utf-8", "replace").partition(" ")
        if not generation.isdecimal() or not engine_id:
            raise DecodeError(f"{data[:80]!r} is no placement")
        return Placement(engine_id, int(generation))


class Directory:
    """Reads leases, and reads and writes placements. Methods raise BusUnavailable.

    Args:
        bus: the Redis of the directory.

    Attributes:
        unreadable: engines whose lease could not be used at the last look, and why.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.unreadable: dict[str, str] = {}

    async def engines(self) -> dict[str, EngineInfo]:
        """Leases of all engines that have one, by id."""
        found: dict[str, EngineInfo] = {}
        unreadable: dict[str, str] = {}
        ids = await self._bus.engines()
        leases = await self._bus.get_all([engine_lease(one) for one in ids]) if ids else []
        for engine_id, data in zip(ids, leases, strict=True):
            if data is None:
                continue
            try:
                info = decode_lease(EngineInfo, data, f"scheduler of engine {engine_id!r}")
            except DecodeError as error:
                unreadable[engine_id] = str(error)
                if engine_id not in self.unreadable:
                    _log.warning("lease not read", engine=engine_id, error=error)
                continue
            if info.redis_url:
                found[engine_id] = info
        self.unreadable = unreadable
        return found

    def routes(self, model_name: str) -> SharedRoutes:
        """What gateways share of their choices among the engines of a model."""
        return SharedRoutes(self._bus, model_name)

    async def memory_share(self) -> float:
        """Share of the directory's memory limit that is in use."""
        return await self._bus.memory_share()

    async def place(self, request_ids: Iterable[str], engine_id: str) -> None:
        """Write the first placement of new requests."""
        data = Placement(engine_id).encode()
        for request_id in request_ids:
            await self._bus.put(placement(request_id), data, PLACEMENT_MS)

    async def find(self, request_id: str) -> Placement | None:
        """The placement of a request; None if there is none.

        Raises:
            DecodeError: it cannot be read.
        """
        data = await self._bus.get(placement(request_id))
        return None if data is None else Placement.decode(data)

    async def move(
        self, request_id: str, old: Placement | None, engine_id: str
    ) -> Placement | None:
        """Change a placement if it is still ``old``; the new one, or None if it is not."""
        generation = 1 if old is None else old.generation + 1
        new = Placement(engine_id, generation)
        before = None if old is None else old.encode()
        key = placement(request_id)
        return new if await self._bus.swap(key, before, new.encode(), PLACEMENT_MS) else None

    async def keep(self, request_id: str, submit: bytes, ttl_ms: int) -> None:
        """Write an encoded Submit, which expires."""
        await self._bus.put(kept_request(request_id), submit, ttl_ms)

    async def renew(self, request_id: str, ttl_ms: int) -> bool:
        """Set when the Submit of a request expires; False: it is not there."""
        return await self._bus.expire(kept_request(request_id), ttl_ms)

    async def kept(self, request_id: str) -> Submit | None:
        """The Submit of a request; None if there is none.

        Raises:
            DecodeError: it cannot be read.
        """
        data = await self._bus.get(kept_request(request_id))
        if data is None:
            return None
        submit: Submit = decode_as(Submit, data)
        return submit
