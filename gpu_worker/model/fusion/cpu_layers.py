"""Modules that replace layers of transformers and call CPU kernels."""

import torch
from torch import nn

from kernels.cpu.elementwise.elementwise import Activation, CpuElements
from kernels.cpu.elementwise.norm import CpuNorm
from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.linear.layers import CpuLinear
from kernels.cpu.linear.weight_packing import PackedLayers


class PackedLinear(nn.Module):
    """One linear layer."""

    def __init__(self, linear: CpuLinear) -> None:
        super().__init__()
        self._linear = linear

    @property
    def layers(self) -> PackedLayers:
        """Its weight."""
        return self._linear.layers

    @property
    def out_dtype(self) -> torch.dtype:
        """The type of its outputs."""
        return self._linear.out_dtype

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N]."""
        return self._linear(x)[0]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) in two calls."""

    def __init__(self, gate_up: CpuLinear, down: CpuLinear) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down

    def forward(
        self,
        x: torch.Tensor,  # [..., hidden]
    ) -> torch.Tensor:
        """Outputs [..., hidden]."""
        return self._down(self._gate_up(x)[0])[0]


class ActivatedMLP(nn.Module):
    """down(f(gate(x)) * up(x)) in three calls.

    Args:
        gate_up: both of them, one after the other.
        activation: f.
        elements: computes it.
        down: the last layer.
    """

    def __init__(
        self,
        gate_up: CpuLinear,
        activation: Activation,
        elements: CpuElements,
        down: CpuLinear,
    ) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._activation = activation
        self._elements = elements
        self._down = down

    def forward(
        self,
        x: torch.Tensor,  # [..., hidden]
    ) -> torch.Tensor:
        """Outputs [..., hidden]."""
        gate, up = self._gate_up(x)
        return self._down(self._elements.activate(self._activation, gate, up))[0]


class FusedNorm(nn.Module):
    """Normalization in one pass.

    Args:
        norm: computes it.
        weight: [D] float32, by which normalized rows are multiplied.
        bias: [D] float32, added then.
    """

    def __init__(
        self, norm: CpuNorm, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._norm = norm

    def forward(
        self,
        x: torch.Tensor,  # [..., D]
    ) -> torch.Tensor:
        """Normalized rows [..., D]."""
        return self._norm(x)


class FusedActivation(nn.Module):
    """An activation of one type.

    Args:
        activation: which.
        elements: computes it.
        own: the module it replaces, which serves all other types.
        dtype: that of the model.
    """

    def __init__(
        self, activation: Activation, elements: CpuElements, own: nn.Module, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._activation = activation
        self._elements = elements
        self._own = own
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elements of x's shape and type."""
        if x.dtype != self._dtype:
            found: torch.Tensor = self._own(x)
            return found
        return self._elements.activate(self._activation, x.contiguous())


class PackedEmbedding(nn.Module):
    """An embedding that reads its weight from a packed layer, so that it is stored once."""

    def __init__(self, layers: PackedLayers, dtype: torch.dtype) -> None:
        super().__init__()
        self._layers = layers
        self._dtype = dtype
        self._lookups = CpuLookups()

    def forward(
        self,
        token_ids: torch.Tensor,  # [...] int64
    ) -> torch.Tensor:
        """Embeddings [..., K]."""
        found = self._lookups.unpack(self._layers, token_ids.flatten(), self._dtype)
        return found.view(*token_ids.shape, -1)
