"""Collectives of a group of ranks: sums of tensors, and what a start and a step exchange.

Tensors on CPUs go through gloo, those on GPUs through NCCL. Each call has a deadline, so that no
rank waits for ever for one that is dead or paused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpu_worker.ranks.member import GroupOver, Member
from shared.logs import EventLog

_START_S = 600.0  # ranks load and compile at different speeds

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class SumTotals:
    """What sums over ranks took so far.

    Attributes:
        seconds: in sums, with the waiting for other ranks.
        count: of tensors.
        num_bytes: that this rank gave into them, in float32.
    """

    seconds: float
    count: int
    num_bytes: int


class Collectives(Protocol):
    """Exchanges of all ranks of a group; every rank makes the same calls in the same order."""

    @property
    def member(self) -> Member:
        """This rank and its group."""

    def sum(self, x: torch.Tensor) -> None:
        """Replace a float32 tensor by its sum over all ranks: the same bits on each.

        Raises:
            GroupOver: a rank is gone or late.
        """

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by that of rank 0.

        Raises:
            GroupOver: a rank is gone or late.
        """

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, as many on all of them.

        Raises:
            GroupOver: a rank is gone or late.
        """

    def set_deadline(self, seconds: float) -> None:
        """The longest time that a call may take from now on."""

    def close(self) -> None:
        """Leave the group: calls of the other ranks fail at once."""


class TorchCollectives:
    """Collectives of torch.distributed.

    Args:
        member: rank and group.
        store: of the group, in which all ranks have joined.
        host: address at which the other ranks reach this one.
        device: of tensors that are summed.
        in_rank_order: sums are added in the order of ranks, whatever the size of a tensor is.

    Raises:
        GroupOver: a rank does not connect.
    """

    def __init__(
        self,
        member: Member,
        store: Store,
        host: str,
        device: torch.device,
        in_rank_order: bool = False,
    ) -> None:
        self._member = member
        self._in_rank_order = in_rank_order and member.num_ranks > 2  # two have one order
        self._deadline = timedelta(seconds=_START_S)
        self._nccl: Any = None
        prefix = PrefixStore(member.group, store)
        with _AsGroupOver(member, "connecting"):
            self._gloo = _gloo(member, PrefixStore("gloo", prefix), host)
            if device.type == "cuda":
                self._nccl = _nccl(member, PrefixStore("nccl", prefix))

    @property
    def member(self) -> Member:
        """This rank and its group."""
        return self._member

    def sum(self, x: torch.Tensor) -> None:
        """Replace a float32 tensor by its sum over all ranks: the same bits on each."""
        group = self._gloo if self._nccl is None else self._nccl
        with _AsGroupOver(self._member, "a sum"):
            if self._in_rank_order:
                parts = [torch.empty_like(x) for _ in range(self._member.num_ranks)]
                gathering = AllgatherOptions()
                gathering.timeout = self._deadline
                group.allgather([parts], [x], gathering).wait()
                x.copy_(parts[0])
                for part in parts[1:]:
                    x.add_(part)
                return
            options = AllreduceOptions()
            options.timeout = self._deadline
            group.allreduce([x], options).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        options = BroadcastOptions()
        options.timeout = self._deadline
        options.rootRank, options.rootTensor = 0, 0
        group = self._nccl if x.is_cuda else self._gloo
        with _AsGroupOver(self._member, "a broadcast"):
            group.broadcast([x], options).wait()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, as many on all of them."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._member.num_ranks)]
        options = AllgatherOptions()
        options.timeout = self._deadline
        with _AsGroupOver(self._member, "a gathering"):
            self._gloo.allgather([found], [own], options).wait()
        return [each.tolist() for each in found]

    def set_deadline(self, seconds: float) -> None:
        """The longest time that a call may take from now on."""
        self._deadline = timedelta(seconds=seconds)

    def close(self) -> None:
        """Leave the group: calls of the other ranks fail at once."""
        if self._nccl is not None:
            self._nccl.abort()
        self._gloo = self._nccl = None


class _AsGroupOver:
    """Turns errors of torch.distributed into GroupOver."""

    def __init__(self, member: Member, what: str) -> None:
        self._member = member
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            why = str(error).strip().partition("\n")[0]
            where = f"rank {self._member.rank} of group {self._member.group}"
            raise GroupOver(f"{where}: {self._what} failed: {why}") from error


def _gloo(member: Member, store: Store, host: str) -> Any:
    kind: Any = distributed_c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=_START_S)
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, member.rank, member.num_ranks, options)


def _nccl(member: Member, store: Store) -> Any:
    kind: Any = distributed_c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=_START_S)
    return kind(store, member.rank, member.num_ranks, options)
