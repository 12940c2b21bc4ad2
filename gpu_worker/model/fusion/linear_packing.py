"""Packs a model's linear layers for CPU kernels: those of torch, and those in few bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.fusion.module_matching import reads_weights
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.linear_arguments import PANEL
from kernels.cpu.linear.weight_packing import PackedLayers, can_gate, can_pack, pack, pack_gated
from kernels.cpu.quantized.quantized_packing import (
    can_pack_quantized,
    pack_quantized,
    pack_quantized_gated,
)


class LinearPacker:
    """Packs linear layers for inputs of one type.

    Args:
        kernels: for which they are packed.
        dtype: of inputs, and of weights that are not quantized.
    """

    def __init__(self, kernels: CpuLayers, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._instructions = kernels.instructions

    def pack(self, linears: Sequence[nn.Linear | QuantizedLinear]) -> PackedLayers | None:
        """Layers that share their input; None: they cannot be packed together."""
        biases = [linear.bias for linear in linears]
        if len({linear.in_features for linear in linears}) > 1:
            return None
        quantized = [each.quantized for each in linears if isinstance(each, QuantizedLinear)]
        if quantized:
            if len(quantized) < len(linears) or not can_pack_quantized(quantized):
                return None
            return pack_quantized(quantized, biases, self._dtype, self._instructions)
        weights: list[Any] = [linear.weight for linear in linears]
        return pack(weights, biases) if all(map(can_pack, weights)) else None

    def pack_gated(
        self, gate: nn.Linear | QuantizedLinear, up: nn.Linear | QuantizedLinear
    ) -> PackedLayers | None:
        """Gate and up of an MLP, of one shape and kind; None: they cannot be packed so."""
        biases: Any = None if gate.bias is None else (gate.bias, up.bias)
        if isinstance(gate, QuantizedLinear) and isinstance(up, QuantizedLinear):
            both = gate.quantized, up.quantized
            if gate.out_features % PANEL or not can_pack_quantized(both):
                return None
            return pack_quantized_gated(*both, biases, self._dtype, self._instructions)
        weight: Any = gate.weight
        also: Any = up.weight
        return pack_gated(weight, also, biases) if can_gate(weight) and can_gate(also) else None

    def pack_alone(self, parent: nn.Module, module: nn.Module) -> PackedLayers | None:
        """A layer whose parent calls it and does not read its weight; None: it stays torch's."""
        if isinstance(module, QuantizedLinear):
            return self.pack([module])
        parameter: Any = module.weight
        weight = parameter.T if isinstance(module, Conv1D) else parameter
        if not can_pack(weight) or weight.dtype != self._dtype or reads_weights(parent):
            return None
        bias: Any = module.bias
        return pack([weight], [bias])
