"""Finds where requests go on, and keeps those in the directory that only their clients know of.

An engine's log has all of its requests, and a gateway has those that it delivers. A request whose
engine, with its Redis, and whose gateway are lost at once is in the directory alone. Its client may
come back with the URL of the stream: another gateway then has another engine generate it again.
Sampling is reproducible, and the tokens that the client has are compared with the new ones by the
checksum in its event id. A repeated POST has the request itself, so only streams are kept.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.fleet.directory import Directory, Placement
from gateway.fleet.members import Member, Members
from gateway.fleet.router import Router
from gateway.fleet.routing import Reason
from shared.codec import encode, field_of
from shared.errors import BusUnavailable, PageStreamError
from shared.logs import EventLog
from shared.messages.requests import Submit

_log = EventLog("gateway.fleet.placements")

_MAX_BYTES = 64 << 20  # of the open requests of one gateway
_MAX_SHARE = 0.8  # of the directory's memory
_RENEW_S = 20.0
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a request goes on.

    Attributes:
        member: its engine.
        submit: that the engine must get, as it has not had the request; None: it has.
    """

    member: Member
    submit: Submit | None = None


class NoEngine(PageStreamError):
    """No engine goes on with a request."""


class Placements:
    """Requests in the directory, and the engines that go on with them.

    Args:
        directory: of the fleet.
        members: its engines.
        router: chooses among them.
        patience_s: how long a request waits for an engine that goes on with it.
        engine_patience_s: without a lease for so long, an engine is lost.
        lifetime_s: how long a request is kept after its gateway was lost, or has ended it.
    """

    def __init__(
        self,
        directory: Directory,
        members: Members,
        router: Router,
        patience_s: float,
        engine_patience_s: float,
        lifetime_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._members = members
        self._router = router
        self._patience_s = patience_s
        self._engine_patience_s = engine_patience_s
        self._lifetime_ms = int((lifetime_s + 2 * _RENEW_S) * 1e3)
        self._clock_s = clock_s
        self._open: dict[str, bytes] = {}  # encoded Submits by request
        self._num_bytes = 0
        self._renew_s = clock_s() + _RENEW_S

    async def keep(self, submits: Iterable[Submit], memory_share: float) -> None:
        """Write requests into the directory, those that can be resumed, while they fit.

        Args:
            memory_share: of the directory, that is in use.

        Raises:
            BusUnavailable: the directory does not answer.
        """
        for submit in submits:
            if field_of(submit.display, "resumable") is not True:
                continue
            data = encode(submit)
            self.closed(submit.request_id)
            if memory_share > _MAX_SHARE or self._num_bytes + len(data) > _MAX_BYTES:
                _log.warning("not kept", request=submit.request_id, bytes=len(data))
                continue
            self._open[submit.request_id] = data
            self._num_bytes += len(data)
            await self._directory.keep(submit.request_id, data, self._lifetime_ms)

    def closed(self, request_id: str) -> None:
        """A request is not delivered here any more: it expires unless another gateway has it."""
        self._num_bytes -= len(self._open.pop(request_id, b""))

    async def expire(self, request_id: str, after_s: float) -> None:
        """No client comes back for a request after that time."""
        try:
            await self._directory.renew(request_id, max(1, int(after_s * 1e3)))
        except BusUnavailable as error:
            _log.warning("kept for longer", request=request_id, error=error)

    async def renew(self) -> None:
        """Keep the open requests for longer, now and then, and write again what is not there.

        Raises:
            BusUnavailable: the directory does not answer.
        """
        if self._clock_s() < self._renew_s:
            return
        for request_id, data in list(self._open.items()):
            if not await self._directory.renew(request_id, self._lifetime_ms):
                await self._directory.keep(request_id, data, self._lifetime_ms)
        self._renew_s = self._clock_s() + _RENEW_S

    async def locate(
        self,
        request_id: str,
        is_waited_for: Callable[[], bool],
        released_by: str = "",
    ) -> Whereabouts | None:
        """Find where a request of which only the id is known goes on.

        Args:
            is_waited_for: whether a call still waits for it.
            released_by: the engine that does not have it any more.

        Returns:
            None if the request is not known, or no call waits for it.

        Raises:
            NoEngine: none could go on with it in that time.
            BusUnavailable: the directory does not answer.
            DecodeError: what it has of the request cannot be read.
        """
        since_s = self._clock_s()
        while is_waited_for():
            old = await self._directory.find(request_id)
            if old is None:
                return None
            member = self._members.by_id.get(old.engine_id)
            is_released = old.engine_id == released_by
            if member is not None and not is_released and not self._is_lost(member):
                return Whereabouts(member)
            submit = await self._directory.kept(request_id)
            if submit is None and (member is None or is_released):
                return None
            waited_s = self._clock_s() - since_s
            # An engine that this gateway never saw may be restarting.
            is_lost = member is not None or is_released or waited_s >= self._engine_patience_s
            if submit is not None and is_lost:
                target = await self._move(submit, old, old.engine_id)
                if target is not None:
                    places = {"source": old.engine_id, "engine": target.engine_id}
                    _log.info("moved from the directory", request=request_id, **places)
                    return Whereabouts(target, submit)
            if waited_s >= self._patience_s:
                raise NoEngine(f"its engine was lost, and no other was ready in {waited_s:.0f} s")
            await asyncio.sleep(_RETRY_S)
        return None

    async def new_place(self, submit: Submit, source: str) -> Member | None:
        """The engine that a request of ``source`` was moved to, by this gateway or another.

        Returns:
            None if there is none yet.

        Raises:
            BusUnavailable: the directory does not answer.
            DecodeError: the placement cannot be read.
        """
        old = await self._directory.find(submit.request_id)
        if old is not None and old.engine_id != source:
            return self._members.by_id.get(old.engine_id)
        return await self._move(submit, old, source)

    async def _move(self, submit: Submit, old: Placement | None, source: str) -> Member | None:
        """Place a request in another engine; None if there is none, or another gateway did."""
        ready = self._members.ready()
        others = [one for one in ready if one.engine_id != source]
        target = self._router.route(submit, others or ready, Reason.MOVED)
        if target is None:
            return None
        new = await self._directory.move(submit.request_id, old, target.engine_id)
        return None if new is None else target

    def _is_lost(self, member: Member) -> bool:
        return self._clock_s() - member.seen_s >= self._engine_patience_s
