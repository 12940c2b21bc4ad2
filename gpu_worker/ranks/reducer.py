"""Sums of partial outputs over all ranks, inside of a forward pass."""

from typing import Protocol

import torch
from torch import nn

from gpu_worker.ranks.collectives import Collectives, SumTotals
from gpu_worker.ranks.member import GroupOver

SUMMED = "inner"
"""Name in a SummedOutput of the layer whose outputs are summed."""


class Reducer(Protocol):
    """Adds partial outputs of all ranks."""

    @property
    def failure(self) -> GroupOver | None:
        """Of the first sum that failed and could not raise it; later ones return at once."""

    @property
    def totals(self) -> SumTotals | None:
        """Of all sums so far; None where they are not measured."""

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type; the partial one is overwritten.

        Raises:
            GroupOver: a rank is gone or late.
        """


class DeviceReducer:
    """Sums on a GPU, in the order of its stream.

    Attributes:
        failure: None: sums raise.
        totals: None: they are not measured.
    """

    failure = None
    totals = None

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type."""
        total = partial.float().contiguous()
        self._collectives.sum(total)
        return total.to(dtype)


class SummedOutput(nn.Module):
    """A layer that computes a part of its sums: those over this rank's inputs.

    Args:
        inner: the layer, or the last of several.
        reducer: adds the parts of all ranks.
        dtype: of the sums.
    """

    def __init__(self, inner: nn.Module, reducer: Reducer, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self._reducer = reducer
        self._dtype = dtype

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N] of the whole layer."""
        return self._reducer.sum(self.inner(x), self._dtype)
