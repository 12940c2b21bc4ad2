"""The log of a job that one gateway at a time writes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from shared.bus.api import Append, Bus, EntryId
from shared.errors import StaleWriter
from shared.tasks import cancel_until_done

_T = TypeVar("_T")
_LEASE_MS = 6_000
_RENEW_S = 1.5
_FLUSH_S = 0.1


class ClaimedLog:
    """Writes the log of a job while no other gateway claims it.

    The epoch of an entry's id is the number of the claim, so Redis refuses what a gateway appends
    after another has claimed the job.

    Args:
        log, lease: keys.
        instance: of this gateway.
        epoch: of the claim.

    Attributes:
        id: of the job.
    """

    def __init__(
        self, bus: Bus, job_id: str, log: str, lease: str, instance: str, epoch: int
    ) -> None:
        self.id = job_id
        self._bus = bus
        self._log = log
        self._lease = lease
        self._instance = instance
        self._next = EntryId(epoch, 1)
        self._writing = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """Of the claim: with it, other logs of the job refuse earlier claims, too."""
        return self._next.epoch

    async def renew(self) -> None:
        """Renew the lease."""
        await self._bus.put(self._lease, self._instance.encode(), _LEASE_MS)

    async def check(self) -> None:
        """Renew the lease if the job is still this gateway's.

        Raises:
            StaleWriter: another gateway has claimed it, or ended it.
        """
        async with self._writing:
            await self._check_end()
        await self.renew()

    async def release(self) -> None:
        """End the lease, so that another gateway need not wait for its end.

        Raises:
            StaleWriter: another gateway has claimed the job, or ended it.
        """
        await self.check()
        await self.drop_lease()

    async def drop_lease(self) -> None:
        """End the lease of a job that has ended."""
        await self._bus.delete(self._lease)

    async def append(
        self,
        messages: Sequence[bytes],
        replaces: bool = False,
        beside: Sequence[Append] = (),
        is_first: bool = False,
    ) -> None:
        """Append an entry.

        Args:
            replaces: it takes the place of all entries before it, which are dropped. They are still
                there if this process dies in between.
            beside: entries of other logs, which become visible together with it.
            is_first: it is the claim.

        Raises:
            StaleWriter: another gateway has claimed the job, or ended it.
        """
        async with self._writing:
            place = self._next
            if not is_first:
                await self._check_end()
            own = Append(self._log, messages, place.epoch, place.seq)
            await self._bus.append_all([own, *beside])
            self._next = EntryId(place.epoch, place.seq + 1)
            if replaces:  # not before: a server without memory would have neither
                await self._bus.trim(self._log, place)

    async def _check_end(self) -> None:
        """Check that the log ends with the entry that was written last.

        A server that has lost its last second would take the next entry, too.
        """
        last = await self._bus.last_id(self._log)
        if last != EntryId(self.epoch, self._next.seq - 1):
            why = "another gateway has claimed it, or its end is lost"
            raise StaleWriter(f"{self._log}: {why}: the last entry is {last}")


async def run_claimed(
    log: ClaimedLog,
    work: Coroutine[Any, Any, _T],
    flush: Callable[[], Awaitable[None]],
    lost: Callable[[], Awaitable[None]] | None = None,
) -> _T:
    """Run the work on a job while the claim holds, and return its result.

    Args:
        flush: writes what is new; called every tenth of a second, and at the end.
        lost: called when another gateway has the claim, before the work is cancelled.

    Raises:
        StaleWriter: another gateway has claimed the job, or ended it.
        BusUnavailable: Redis does not answer; what was not written has to be done again.
    """
    task = asyncio.create_task(work)
    renewed_s = time.monotonic()
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_FLUSH_S)
            await flush()
            if time.monotonic() - renewed_s > _RENEW_S:
                await log.check()
                renewed_s = time.monotonic()
    except StaleWriter:
        if lost is not None:
            await lost()
        raise
    finally:
        await cancel_until_done(task)
    return task.result()
