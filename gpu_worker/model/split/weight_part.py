"""The part of a weight that a rank has."""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Ranges:
    """Indices of a dimension, as half-open intervals in their order."""

    intervals: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Number of indices."""
        return sum(stop - start for start, stop in self.intervals)

    def times(self, factor: int) -> "Ranges":
        """The same where each index stands for so many."""
        return Ranges(tuple((factor * a, factor * b) for a, b in self.intervals))

    def moved(self, by: int) -> "Ranges":
        """The same, so much farther behind."""
        return Ranges(tuple((a + by, b + by) for a, b in self.intervals))

    def then(self, other: "Ranges") -> "Ranges":
        """These and others behind them."""
        return Ranges(self.intervals + other.intervals)


def share(size: int, rank: int, num_ranks: int) -> Ranges:
    """The share of a rank of so many indices; shares differ by one at most."""
    return Ranges(((rank * size // num_ranks, (rank + 1) * size // num_ranks),))


@dataclass(frozen=True, slots=True)
class Part:
    """Some indices of one dimension of a weight.

    Attributes:
        dim: the dimension.
        ranges: indices of it.
        is_zero: the part is zero instead: another rank adds it.
    """

    dim: int
    ranges: Ranges
    is_zero: bool = False

    def shape(self, whole: torch.Size) -> tuple[int, ...]:
        """The shape of the part of a weight of this shape."""
        return (*whole[: self.dim], self.ranges.size, *whole[self.dim + 1 :])

    def read(self, stored: Any) -> torch.Tensor:
        """Read the part from a slice of safetensors; no other element is read.

        Args:
            stored: can be indexed by slices.
        """
        before = (slice(None),) * self.dim
        parts = [stored[(*before, slice(a, b))] for a, b in self.ranges.intervals]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_quantized(self, whole: QuantizedWeight) -> QuantizedWeight:
        """A copy of the part of a weight in few bits; outputs are dimension 0, inputs 1.

        Raises:
            ValueError: its groups cannot be cut there, or its inputs are rounded row by row.
        """
        if self.dim == 0:
            return QuantizedWeight.joined([whole.rows(a, b) for a, b in self.ranges.intervals])
        if whole.rounds_rows:
            raise ValueError(
                "its inputs are rounded to int8 with one scale for each row, of which each worker "
                "has a part; use --tensor-parallel-size 1"
            )
        ((begin, end),) = self.ranges.intervals
        return QuantizedWeight.joined([whole.columns(begin, end)])
