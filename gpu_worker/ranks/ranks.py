"""A rank's connection to the others while it loads its part of a model and serves it."""

from dataclasses import dataclass

import torch

from gpu_worker.ranks.collectives import Collectives, TorchCollectives
from gpu_worker.ranks.member import GroupOver, Member
from gpu_worker.ranks.reducer import DeviceReducer, Reducer
from gpu_worker.ranks.tcp_rendezvous import TcpRendezvous


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group of this rank.

    Attributes:
        collectives: of the group.
        reducer: adds partial outputs in forward passes.
    """

    collectives: Collectives
    reducer: Reducer

    @classmethod
    def of(cls, collectives: Collectives, device: torch.device) -> "Ranks":
        """With the reducer for a device."""
        if device.type == "cuda":
            return cls(collectives, DeviceReducer(collectives))
        from gpu_worker.ranks.cpu_reducer import reducer_of  # it imports numba

        return cls(collectives, reducer_of(collectives))

    @property
    def member(self) -> Member:
        """This rank and its group."""
        return self.collectives.member

    def minimum(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(found for (found,) in self.collectives.gather([number]))

    def all(self, condition: bool) -> bool:
        """Whether a condition holds on all ranks."""
        return bool(self.minimum(int(condition)))

    def sums_s(self) -> float | None:
        """Seconds in sums so far; None where that is not measured, on GPUs."""
        totals = self.reducer.totals
        return None if totals is None else totals.seconds

    def failure(self) -> GroupOver | None:
        """The error of a sum that could not raise it; None: there was none."""
        return self.reducer.failure


def connect(
    member: Member, rendezvous: TcpRendezvous, host: str, device: torch.device, deterministic: bool
) -> Ranks:
    """Connect to all ranks of a group that is complete.

    Args:
        member: rank and group.
        rendezvous: that has joined it.
        host: address at which the other ranks reach this one.
        device: of the model.
        deterministic: sums are added in the order of ranks.

    Raises:
        GroupOver: a rank does not connect.
    """
    assert rendezvous.store is not None
    collectives: Collectives = TorchCollectives(
        member, rendezvous.store, host, device, deterministic
    )
    if device.type == "cpu":
        from gpu_worker.ranks.shared_memory import share_memory  # it imports numba

        collectives = share_memory(collectives)
    return Ranks.of(collectives, device)
