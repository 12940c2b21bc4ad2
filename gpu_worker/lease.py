"""The lease: a key with a lifetime by which a worker announces its state and its model."""

import asyncio
import time
from collections.abc import Callable

from gpu_worker.ranks.member import ALONE, Member
from shared.bus.api import Bus
from shared.bus.keys import EngineKeys
from shared.codec import decode_as, encode
from shared.errors import DecodeError, PageStreamError
from shared.logs import EventLog
from shared.messages.leases import PROTOCOL, KVGeometry, ModelInfo, Speeds, WorkerInfo, WorkerState

TTL_MS = 5_000
_RENEWAL_S = 1.5
# These are never renewed: a worker that loads is busy, and one that has failed is gone.
_LOADING_TTL_MS = 10 * 60 * 1_000
_FAILED_TTL_MS = 60 * 60 * 1_000
_NOW_MS = 1  # the shortest life a key can have
_FAILED_ATTEMPTS = 12

log = EventLog(__name__)


class LeaseTaken(PageStreamError):
    """Another worker holds the lease now."""


class Lease:
    """The key that names the worker of one rank of an engine.

    Args:
        bus: stores the key.
        keys: of the engine.
        member: the worker's rank and group.
        clock_s: monotonic time.
    """

    def __init__(
        self,
        bus: Bus,
        keys: EngineKeys,
        member: Member = ALONE,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._keys = keys
        self._key = keys.worker(member.rank)
        self._member = member
        self._clock_s = clock_s
        self._ready: bytes | None = None
        self._instance = ""
        self._due_s = 0.0

    async def publish_loading(self, instance: str) -> None:
        """Publish that this worker loads a model, unless another worker serves meanwhile.

        A rank of several publishes it in any case: its process has left its group, so that no
        epoch can go on.
        """
        if self._member.is_alone and await self._has_ready_holder():
            return  # this would end the epoch of the worker that is about to be replaced
        info = self._without_model(instance, WorkerState.LOADING, "")
        await self._bus.put(self._key, encode(info), _LOADING_TTL_MS)

    async def publish_failed(self, instance: str, why: str) -> None:
        """Publish why this worker cannot start; the entry outlives the process."""
        info = self._without_model(instance, WorkerState.FAILED, why)
        for _ in range(_FAILED_ATTEMPTS):
            if not await self._has_ready_holder():
                await self._bus.put(self._key, encode(info), _FAILED_TTL_MS)
                return
            await asyncio.sleep(TTL_MS / 1000 / _FAILED_ATTEMPTS)
        log.warning("another worker serves this engine; its lease is left alone")

    async def acquire(
        self,
        instance: str,
        model: ModelInfo,
        kv: KVGeometry,
        speeds: Speeds,
        longest_step_s: float = 0.0,
        life: str = "",
    ) -> None:
        """Take the lease, also from another worker; it must be renewed from now on."""
        self._ready = encode(self._info(instance, WorkerState.READY, "", model, kv, speeds, life))
        self._instance = instance
        await self._put(_ttl_ms(longest_step_s))

    async def renew_if_due(self, longest_step_s: float) -> bool:
        """Renew the lease if it is time.

        Args:
            longest_step_s: the lease must outlive a step, because it is not renewed in one.

        Returns:
            Whether it was renewed.

        Raises:
            LeaseTaken: a worker that started later holds it.
        """
        if self._clock_s() < self._due_s:
            return False
        if await self.is_held_by_other():
            self._ready = None
            raise LeaseTaken("another worker has taken the engine over")
        await self._put(_ttl_ms(longest_step_s))
        return True

    async def release(self) -> None:
        """Give the lease up, so that the scheduler need not wait until it expires.

        A lease that another worker has taken meanwhile is left alone.
        """
        if self._ready is not None and not await self.is_held_by_other():
            await self._bus.put(self._key, self._ready, _NOW_MS)
        self._ready = None

    async def is_held_by_other(self) -> bool:
        """Whether another worker holds the lease and is ready."""
        holder = await self._holder()
        return (
            holder is not None
            and holder.state == WorkerState.READY
            and holder.instance != self._instance
        )

    async def other_ready_holder(self) -> WorkerInfo | None:
        """The worker of another parent that serves as this rank; None: there is none.

        A parent has one worker at a time: one of this process's parent is dead.
        """
        holder = await self._holder()
        if holder is None or holder.state != WorkerState.READY:
            return None
        is_dead = self._member.parent != "" and holder.parent == self._member.parent
        return None if is_dead else holder

    async def of_rank(self, rank: int) -> WorkerInfo | None:
        """The lease of a rank; None: it has none that can be read."""
        return await self._read(self._keys.worker(rank))

    def _without_model(self, instance: str, state: WorkerState, detail: str) -> WorkerInfo:
        return self._info(instance, state, detail, None, None, None, "")

    def _info(
        self,
        instance: str,
        state: WorkerState,
        detail: str,
        model: ModelInfo | None,
        kv: KVGeometry | None,
        speeds: Speeds | None,
        life: str,
    ) -> WorkerInfo:
        member = self._member
        return WorkerInfo(
            instance=instance,
            rank=member.rank,
            state=state,
            detail=detail,
            model=model,
            kv=kv,
            speeds=speeds,
            life=life,
            protocol=PROTOCOL,
            num_ranks=member.num_ranks,
            group=member.group,
            address=member.address,
            parent=member.parent,
        )

    async def _has_ready_holder(self) -> bool:
        holder = await self._holder()
        return holder is not None and holder.state == WorkerState.READY

    async def _holder(self) -> WorkerInfo | None:
        return await self._read(self._key)

    async def _read(self, key: str) -> WorkerInfo | None:
        value = await self._bus.get(key)
        try:
            return None if value is None else decode_as(WorkerInfo, value)
        except DecodeError:
            return None  # written by another version, so it may be replaced

    async def _put(self, ttl_ms: int) -> None:
        assert self._ready is not None, "the lease was never taken"
        await self._bus.put(self._key, self._ready, ttl_ms)
        self._due_s = self._clock_s() + _RENEWAL_S


def _ttl_ms(longest_step_s: float) -> int:
    """A lifetime of a few of the longest steps, because the lease is not renewed in a step."""
    return TTL_MS + int(4_000 * longest_step_s)
