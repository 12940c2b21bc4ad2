"""Rounds weights of whole layers as the ranks have rounded their parts, with ``--quantization``."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.quantization.requested_format import quantized_weight
from gpu_worker.model.split.stored_weights import set_parameter
from gpu_worker.ranks.collectives import Collectives
from gpu_worker.ranks.reducer import SUMMED


@dataclass(frozen=True, slots=True)
class _Rounding:
    bits: int
    inputs: tuple[int, ...]  # of each rank's part


class LoadRounding:
    """The formats of the linear layers that were quantized at load.

    Groups of inputs that share a scale do not cross the parts of ranks, so that each part is
    rounded by itself.

    Args:
        model: of this rank, quantized.
        collectives: of all ranks, which make the same calls.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        layers = {
            name.replace(f".{SUMMED}", ""): module
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        inputs = collectives.gather([layer.in_features for layer in layers.values()])
        self._layers = {
            name: _Rounding(layer.quantized.bits, each)
            for (name, layer), each in zip(layers.items(), zip(*inputs, strict=True), strict=True)
        }

    @torch.no_grad()
    def round(self, module: nn.Module, prefix: str, dtype: torch.dtype) -> None:
        """Replace weights of a module, whose names begin with ``prefix``, by rounded ones."""
        for name, layer in list(module.named_modules()):
            rounding = self._layers.get(f"{prefix}.{name}")
            if rounding is None:
                continue
            is_transposed = isinstance(layer, Conv1D)
            weight = layer.weight.T if is_transposed else layer.weight  # [N, K]
            sizes = list(rounding.inputs)
            if sum(sizes) != weight.shape[1]:  # its outputs are split
                sizes = [weight.shape[1]]
            parts = [quantized_weight(part, rounding.bits) for part in weight.split(sizes, 1)]
            rounded = torch.cat([part.dequantize() for part in parts if part is not None], 1)
            rounded = rounded.T if is_transposed else rounded
            set_parameter(module, f"{name}.weight", rounded.to(dtype))
