"""Linear layers with the same input, computed in one call on any device."""

from collections.abc import Callable, Sequence

import torch
from torch import nn


class SharedInput:
    """Layers that a model calls one after the other with the same input, computed in one call.

    The first one called computes all; the others, if called with the same tensor, return outputs
    that are computed already. Any order of calls and any inputs give correct outputs.
    """

    def __init__(self, linear: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        self._linear = linear
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Output [..., N] of one of the layers."""
        found = self._outputs[index] if x is self._input else None
        if found is None:
            self._outputs = list(self._linear(x))
            self._input = x
            found = self._outputs[index]
            assert found is not None
        # An output is returned once and then forgotten: its caller may write to it, and its memory
        # is freed as soon as possible.
        self._outputs[index] = None
        if all(output is None for output in self._outputs):
            self._input = None
        return found


class SharedInputLinear(nn.Module):
    """One of the linear layers that share their input."""

    def __init__(self, shared: SharedInput, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N]."""
        return self._shared.output(self._index, x)
