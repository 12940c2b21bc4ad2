"""Replaces the layers of a loaded model by fused ones for GPUs.

Projections of one input become one matrix product. One launch each are: RMS normalization with the
residual sum before it, rotary embeddings with the write of keys and values, the gate of an MLP.
Layers that would compute differently stay the model's own.
In deterministic mode every linear layer has rows that do not depend on each other; torch's choose
the order of sums by the number of rows.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.fusion.gpu_layers import (
    JoinedLinear,
    RowLinear,
    TritonGatedMLP,
    TritonRMSNorm,
    linear_function,
)
from gpu_worker.model.fusion.module_matching import (
    QKV,
    agrees,
    gated_linears,
    linears_of,
    norm_factors,
    places,
)
from gpu_worker.model.fusion.residual_sums import fuse_sums, probe
from gpu_worker.model.fusion.rotary import RotaryReplacer
from gpu_worker.model.fusion.shared_input import SharedInput, SharedInputLinear
from kernels.triton.layers import DTYPES, can_norm, rotate
from shared.errors import ModelUnsupported


@dataclass(slots=True)
class GpuFusion:
    """Numbers of replaced layers.

    Attributes:
        shared_inputs: attention layers that compute queries, keys and values in one product.
        gated_mlps: MLPs that compute gate and up in one product.
        norms: RMS normalizations.
        rotaries: attention layers that rotate queries and keys in one launch.
        rotary_writes: those that store keys and values in the same launch.
        residual_sums: decoder layers whose sums are fused with the normalizations after them.
        row_linears: linear layers that run one by one, rows independent of each other.
        kept: linear layers that stay torch's.
    """

    shared_inputs: int = 0
    gated_mlps: int = 0
    norms: int = 0
    rotaries: int = 0
    rotary_writes: int = 0
    residual_sums: int = 0
    row_linears: int = 0
    kept: int = 0

    def counts(self) -> dict[str, int]:
        """Numbers of each kind, for the log."""
        return asdict(self)


@torch.inference_mode()
def fuse_on_gpu(
    model: nn.Module, attention: Iterable[nn.Module], deterministic: bool = False
) -> GpuFusion:
    """Replace layers in place; weights are freed once they are joined.

    Args:
        model: of transformers, in evaluation mode, on a GPU (or on a CPU, in Triton's interpreter).
        attention: its attention layers.
        deterministic: make the rows of all linear layers independent of each other.
    """
    replacer = _LayerReplacer(next(model.parameters()).device, deterministic)
    for module in list(model.modules()):
        replacer.join_qkv(module)
    attention = list(attention)
    for module in attention:
        replacer.replace_rotary(module)
    for parent, name, module in places(model):
        replacer.replace_mlp(parent, name, module)
    for parent, name, module in places(model):
        replacer.replace_linear(parent, name, module)
        replacer.replace_norm(parent, name, module)
    replacer.fuse_across_modules(model, attention)
    return replacer.done


class _LayerReplacer:
    """Replaces layers and counts them."""

    def __init__(self, device: torch.device, deterministic: bool) -> None:
        self.done = GpuFusion()
        self._device = device
        self._deterministic = deterministic
        self._linear = linear_function(deterministic)
        self._mlps: dict[
            type[nn.Module], bool
        ] = {}  # whether the fused MLP of a type computes the same
        self._rotary = RotaryReplacer(rotate, DTYPES, device)

    def join_qkv(self, module: nn.Module) -> None:
        """Compute the projections of an attention layer in one product."""
        linears = linears_of(module, QKV, nn.Linear)
        if linears is None or not JoinedLinear.can_join(linears) or not _served(linears):
            return
        joined = JoinedLinear(linears, self._linear)
        module.add_module("qkv_proj", joined)  # so that its weights are the model's
        shared = SharedInput(joined)
        for index, name in enumerate(QKV):
            setattr(module, name, SharedInputLinear(shared, index))
        self.done.shared_inputs += 1

    def replace_mlp(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Compute gate, SiLU and up of an MLP together, if it has no other parts."""
        linears = gated_linears(module, nn.Linear)
        if linears is None or not _served(linears) or self._mlps.get(type(module)) is False:
            return
        gate, up, down = linears
        fused = TritonGatedMLP(gate, up, down, self._linear)
        if type(module) not in self._mlps:
            dtype = gate.weight.dtype
            same = agrees(module, fused, gate.in_features, dtype, self._device)
            self._mlps[type(module)] = same
        if self._mlps[type(module)]:
            setattr(parent, name, fused)
            self.done.gated_mlps += 1

    def replace_linear(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """In deterministic mode, make the rows of a layer independent of each other."""
        if type(module) not in (nn.Linear, Conv1D):
            return
        weight: Any = module.weight
        if not self._deterministic or weight.dtype not in DTYPES:
            self.done.kept += 1
            return
        bias: Any = module.bias
        setattr(parent, name, RowLinear(weight, bias, isinstance(module, Conv1D)))
        self.done.row_linears += 1

    def replace_norm(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Fuse an RMS normalization that multiplies by its weight, or by 1 + its weight."""
        found = norm_factors(module)
        if found is None:
            return
        dtype: Any = module.weight.dtype
        epsilon, factors = found
        for factor in factors:
            if dtype not in DTYPES or not can_norm(len(factor)):
                return
            fused = TritonRMSNorm(factor, epsilon)
            if agrees(module, fused, len(factor), dtype, self._device):
                setattr(parent, name, fused)
                self.done.norms += 1
                return

    def replace_rotary(self, module: nn.Module) -> None:
        """Let an attention layer's own code call the fused rotary embedding."""
        self.done.rotaries += self._rotary.replace(module, next(module.parameters()).dtype)

    def fuse_across_modules(self, model: nn.Module, attention: list[nn.Module]) -> None:
        """Fuse rotary embeddings with writes, and residual sums with normalizations.

        Modules must be called one after the other for that. A pass over a few tokens tries it.
        """
        deferred = self._rotary.defer(attention)
        if deferred:
            try:
                probe(model)
                works = not any(rotary.is_left for rotary in deferred)
            except ModelUnsupported:
                works = False
            if works:
                self.done.rotary_writes = sum(rotary.was_taken for rotary in deferred)
            else:
                self._rotary.defer_no_more(attention)
        self.done.residual_sums = fuse_sums(model)


def _served(linears: list[nn.Linear]) -> bool:
    return linears[0].weight.dtype in DTYPES
