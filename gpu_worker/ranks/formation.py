"""Forms the group of an engine's ranks by their leases.

Rank 0 draws the group's name, opens a store and announces both in its lease. The other ranks join
the group that this lease names. A rank that starts again has left its group for good: it announces
that it loads, which ends the group for the others, too. So two generations never meet.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from secrets import token_hex
from typing import Protocol

from gpu_worker.lease import Lease
from gpu_worker.ranks.member import GroupOver, Member
from shared.bus.api import Bus
from shared.bus.keys import EngineKeys
from shared.errors import BusUnavailable
from shared.logs import EventLog
from shared.messages.leases import WorkerInfo, WorkerState

_POLL_S = 0.1
_ANNOUNCE_S = 2.0  # between two announcements, since a lease may be lost

log = EventLog(__name__)


class Joining(Protocol):
    """A rank's entry in the store of a group."""

    def is_complete(self) -> bool:
        """Whether all ranks have joined.

        Raises:
            GroupOver: the store is gone.
        """


class Rendezvous(Protocol):
    """The place where the ranks of a group meet."""

    def open(self, group: str) -> tuple[str, Joining]:
        """Open a store and join as rank 0: its address, HOST:PORT, and the entry."""

    def join(self, group: str, address: str) -> Joining:
        """Join as another rank.

        Raises:
            GroupOver: the store cannot be reached, or has this rank already.
        """


async def form_group(
    bus: Bus,
    keys: EngineKeys,
    member: Member,
    instance: str,
    rendezvous: Rendezvous,
    draw_name: Callable[[], str] = lambda: token_hex(8),
    pause: Callable[[float], object] | None = None,
) -> Member:
    """Wait until all ranks of an engine are there; the member with its group.

    Args:
        bus: has the leases.
        keys: of the engine.
        member: rank, number of ranks and parent of this process.
        instance: that announces; another one serves later.
        rendezvous: of this rank.
        draw_name: draws the group's name.
        pause: an awaitable that sleeps so many seconds; None: asyncio's.
    """
    forming = _Forming(bus, keys, member, instance, rendezvous, draw_name)
    waits_for = ""
    while True:
        try:
            found, why = await forming.attempt()
        except BusUnavailable as error:
            found, why = None, f"Redis: {error}"
        except GroupOver as error:
            found, why = None, str(error)
        if found is not None:
            log.info("group formed", group=found.group, rank=found.rank, ranks=found.num_ranks)
            return found
        if why != waits_for:
            log.info("waiting for other ranks", rank=member.rank, detail=why)
            waits_for = why
        await (asyncio.sleep(_POLL_S) if pause is None else pause(_POLL_S))  # type: ignore[misc]


class _Forming:
    """One process that forms or joins groups until one is complete."""

    def __init__(
        self,
        bus: Bus,
        keys: EngineKeys,
        member: Member,
        instance: str,
        rendezvous: Rendezvous,
        draw_name: Callable[[], str],
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._member = member
        self._instance = instance
        self._rendezvous = rendezvous
        self._draw_name = draw_name
        self._joining: Joining | None = None
        self._until_announced = 0  # attempts until the state is announced again

    async def attempt(self) -> tuple[Member | None, str]:
        """One step towards a group: the member of a complete one, or what is waited for.

        Raises:
            BusUnavailable: the server does not answer.
            GroupOver: the store of the group is gone.
        """
        lease = self._lease()
        if (holder := await lease.other_ready_holder()) is not None:
            self._leave()
            return None, f"instance {holder.instance} is rank {self._member.rank}"
        if self._member.rank == 0:
            return await self._lead()
        return await self._follow()

    async def _lead(self) -> tuple[Member | None, str]:
        if self._joining is None:
            group = self._draw_name()
            address, self._joining = self._rendezvous.open(group)
            self._member = replace(self._member, group=group, address=address)
            self._until_announced = 0
        await self._announce_if_due()
        if self._is_complete(self._joining):
            return self._member, ""
        return None, f"group {self._member.group} is not complete"

    async def _follow(self) -> tuple[Member | None, str]:
        leader = await self._leader()
        has_joined = leader is not None and self._joining and leader.group == self._member.group
        is_open = leader is not None and leader.group and leader.state == WorkerState.LOADING
        if leader is None or not (has_joined or is_open):
            self._leave()
            await self._announce_if_due()
            return None, "rank 0 has announced no group"
        if leader.num_ranks != self._member.num_ranks:
            self._leave()
            sizes = f"{leader.num_ranks} ranks, this process {self._member.num_ranks}"
            return None, f"rank 0 has --tensor-parallel-size for {sizes}"
        if not has_joined:
            self._leave()
            self._joining = self._rendezvous.join(leader.group, leader.address)
            self._member = replace(self._member, group=leader.group)
            self._until_announced = 0
        await self._announce_if_due()
        assert self._joining is not None
        if self._is_complete(self._joining):
            return self._member, ""
        return None, f"group {self._member.group} is not complete"

    def _is_complete(self, joining: Joining) -> bool:
        try:
            return joining.is_complete()
        except GroupOver:
            self._leave()
            raise

    def _leave(self) -> None:
        self._joining = None
        self._member = replace(self._member, group="", address="")

    async def _announce_if_due(self) -> None:
        if self._until_announced == 0:
            await self._lease().publish_loading(self._instance)
            self._until_announced = int(_ANNOUNCE_S / _POLL_S)
        self._until_announced -= 1

    def _lease(self) -> Lease:
        return Lease(self._bus, self._keys, self._member)

    async def _leader(self) -> WorkerInfo | None:
        return await self._lease().of_rank(0)
