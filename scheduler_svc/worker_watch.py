"""The leases of an engine's workers as a scheduler sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.bus.api import Bus
from shared.bus.keys import EngineKeys
from shared.errors import DecodeError
from shared.messages.leases import (
    EngineState,
    KVGeometry,
    ModelInfo,
    Speeds,
    WorkerInfo,
    WorkerState,
    decode_lease,
)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of all ranks of an engine, which are ready and of one group.

    Attributes:
        instances: by rank.
        lives: by rank.
        model: which all of them serve.
        kv: sizes of pools that every rank has.
        speeds: of the slowest rank; None: a rank has measured none.
    """

    instances: tuple[str, ...]
    lives: tuple[str, ...]
    model: ModelInfo
    kv: KVGeometry
    speeds: Speeds | None

    @classmethod
    def of(cls, leases: Sequence[WorkerInfo]) -> "WorkerGroup":
        """The group of these leases, one for each rank."""
        first = leases[0]
        assert first.model is not None, "a ready worker's lease has its model"
        pools = [lease.kv for lease in leases if lease.kv is not None]
        assert len(pools) == len(leases), "a ready worker's lease has its pool's size"
        speeds = [lease.speeds for lease in leases if lease.speeds is not None]
        return cls(
            instances=tuple(lease.instance for lease in leases),
            lives=tuple(lease.life for lease in leases),
            model=first.model,
            kv=KVGeometry(
                num_blocks=min(pool.num_blocks for pool in pools),
                block_size=pools[0].block_size,
                bytes_per_block=max(pool.bytes_per_block for pool in pools),
                num_host_blocks=min(pool.num_host_blocks for pool in pools),
            ),
            speeds=_slowest(speeds) if len(speeds) == len(leases) else None,
        )

    @property
    def can_survive(self) -> bool:
        """Whether equal lives show that no rank has died."""
        return "" not in self.lives


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """One look at the leases.

    Attributes:
        group: the workers; None: they are not ready, or not all of them.
        state: of the engine, as far as the workers decide about it.
        detail: why the engine is not ready; "" if the workers are.
    """

    group: WorkerGroup | None
    state: EngineState
    detail: str


async def look_at_workers(bus: Bus, keys: EngineKeys) -> WorkerLook:
    """Read the leases of all ranks; that of rank 0 has their number.

    Raises:
        BusUnavailable: the server does not answer.
    """
    leases: list[WorkerInfo] = []
    waits_for: str | None = None
    num_ranks = 1
    while len(leases) < num_ranks:
        found = await _lease_of(bus, keys, len(leases), num_ranks)
        if isinstance(found, WorkerLook):
            if found.state is EngineState.FAILED or not leases:
                return found
            return WorkerLook(None, EngineState.STARTING, waits_for or found.detail)
        num_ranks = max(1, found.num_ranks) if not leases else num_ranks
        name = _name(len(leases), num_ranks)
        if found.state == WorkerState.FAILED:
            return WorkerLook(None, EngineState.FAILED, _of_rank(found, num_ranks))
        if found.state != WorkerState.READY:
            waits_for = waits_for or f"no {name} is ready"
        leases.append(found)
    waits_for = waits_for or _why_no_group(leases)
    if waits_for is not None:
        return WorkerLook(None, EngineState.STARTING, waits_for)
    return WorkerLook(WorkerGroup.of(leases), EngineState.READY, "")


async def _lease_of(
    bus: Bus, keys: EngineKeys, rank: int, num_ranks: int
) -> WorkerInfo | WorkerLook:
    """The lease of a rank, or why it cannot be used."""
    name = _name(rank, num_ranks)
    value = await bus.get(keys.worker(rank))
    if value is None:
        return WorkerLook(None, EngineState.STARTING, f"no {name} is ready")
    try:
        return decode_lease(WorkerInfo, value, name)
    except DecodeError as error:
        return WorkerLook(None, EngineState.FAILED, str(error))


def _why_no_group(leases: Sequence[WorkerInfo]) -> str | None:
    """Why ready workers are no group; None: they are one."""
    first = leases[0]
    for lease in leases[1:]:
        if lease.group != first.group or lease.num_ranks != first.num_ranks:
            return f"rank {lease.rank} has not joined the group of rank 0"
        if lease.model != first.model:
            return f"rank {lease.rank} serves another model than rank 0"
    return None


def _slowest(speeds: Sequence[Speeds]) -> Speeds:
    return Speeds(
        min(each.prefill_tokens_per_s for each in speeds),
        min(each.swap_bytes_per_s for each in speeds),
        max(each.step_overhead_s for each in speeds),
        max(each.decode_token_s for each in speeds),
    )


def _name(rank: int, num_ranks: int) -> str:
    return "worker" if num_ranks == 1 else f"worker of rank {rank}"


def _of_rank(lease: WorkerInfo, num_ranks: int) -> str:
    return lease.detail if num_ranks == 1 else f"rank {lease.rank}: {lease.detail}"
