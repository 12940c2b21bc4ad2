"""Replaces the layers of a loaded model by ones that call CPU kernels.

Linear layers are packed. Those that share an input become one call, a gated MLP two or three calls,
normalizations and activations one call each. Layers that the kernels would compute differently
stay the model's own. Logits are not rounded: their differences decide which token is the likeliest,
and large ones are 0.125 apart in bfloat16.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.model.fusion.activations import find_activation
from gpu_worker.model.fusion.cpu_layers import (
    ActivatedMLP,
    FusedActivation,
    FusedNorm,
    GatedMLP,
    PackedEmbedding,
    PackedLinear,
)
from gpu_worker.model.fusion.linear_packing import LinearPacker
from gpu_worker.model.fusion.module_matching import (
    QKV,
    Place,
    agrees,
    gated_linears,
    joined_gated_linears,
    layer_norm_terms,
    linears_of,
    norm_factors,
    places,
)
from gpu_worker.model.fusion.rotary import RotaryReplacer
from gpu_worker.model.fusion.shared_input import SharedInput, SharedInputLinear
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.ranks.reducer import SummedOutput
from kernels.cpu.elementwise.elementwise import Activation
from kernels.cpu.linear.layers import CpuLayers, CpuLinear
from kernels.cpu.linear.library_blocks import find_library
from kernels.cpu.linear.library_trial import LibraryTrial
from kernels.cpu.linear.linear_arguments import PANEL
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.runtime.instruction_set import detect

_CPU = torch.device("cpu")
_KINDS: tuple[type[nn.Module], ...] = (nn.Linear, QuantizedLinear)


@dataclass(slots=True)
class Fusion:
    """Numbers of replaced layers.

    Attributes:
        packed: linear layers that run one by one.
        shared_inputs: attention layers that compute queries, keys and values in one call.
        gated_mlps: MLPs that compute gate and up in one call.
        norms: normalizations.
        activations: outside gated MLPs.
        rotaries: attention layers that rotate queries and keys in one call.
        narrow: linear weights that bfloat16 holds without loss, stored in bfloat16.
        quantized: calls over weights in few bits.
        embeddings_shared: embeddings that read the packed weights of the output layer.
        embeddings_copied: embeddings that keep a weight which the output layer has packed, too.
        kept: linear layers that stay torch's.
        products: types of the numbers that packed layers multiply.
        layers: packed weights.
    """

    packed: int = 0
    shared_inputs: int = 0
    gated_mlps: int = 0
    norms: int = 0
    activations: int = 0
    rotaries: int = 0
    narrow: int = 0
    quantized: int = 0
    embeddings_shared: int = 0
    embeddings_copied: int = 0
    kept: int = 0
    products: set[str] = field(default_factory=set)
    layers: list[PackedLayers] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        """Memory of packed weights."""
        return sum(packed.weight.nbytes for packed in self.layers)

    def counts(self) -> dict[str, int]:
        """Numbers of each kind, for the log."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: count for name, count in found.items() if isinstance(count, int)}


def find_kernels(dtype: torch.dtype) -> CpuLayers | None:
    """The kernels for layers of a type on this CPU; None: there are none."""
    instructions = detect()
    if instructions is None or dtype not in CpuLayers.dtypes:
        return None
    return CpuLayers(instructions, LibraryTrial(find_library(instructions)))


@torch.inference_mode()
def fuse(
    model: nn.Module, kernels: CpuLayers, dtype: torch.dtype, attention: Iterable[nn.Module] = ()
) -> Fusion:
    """Replace layers in place; each weight is freed once it is packed.

    Args:
        model: of transformers, on the CPU, in evaluation mode.
        kernels: make the new layers.
        dtype: of the model.
        attention: its attention layers.
    """
    replacer = _LayerReplacer(kernels, dtype)
    for module in attention:
        replacer.replace_rotary(module)
    for module in list(model.modules()):
        replacer.join_qkv(module)
    for parent, name, module in places(model):
        replacer.replace_mlp(parent, name, module)
    embeddings, head = _tied_embeddings(model), _output_layer(model)
    for parent, name, module in places(model):
        is_exact = module is head or isinstance(parent, SummedOutput)
        out_dtype = torch.float32 if is_exact else dtype
        replacer.replace_linear(parent, name, module, embeddings, out_dtype)
        replacer.replace_norm(parent, name, module)
        replacer.replace_activation(parent, name, module)
    return replacer.done


class _LayerReplacer:
    """Replaces layers and counts them."""

    def __init__(self, kernels: CpuLayers, dtype: torch.dtype) -> None:
        self.done = Fusion()
        self._kernels = kernels
        self._dtype = dtype
        self._packer = LinearPacker(kernels, dtype)
        # MLPs by type and activation; None: SiLU, unless the type is refused.
        self._refused: set[tuple[type[nn.Module], Activation | None]] = set()
        self._proven: set[tuple[type[nn.Module], Activation | None]] = set()
        self._rotary = RotaryReplacer(kernels.rotary(dtype), kernels.dtypes, _CPU, partial=True)

    def replace_rotary(self, module: nn.Module) -> None:
        """Let an attention layer's own code call the rotary kernel."""
        self.done.rotaries += self._rotary.replace(module, self._dtype)

    def join_qkv(self, module: nn.Module) -> None:
        """Compute the projections of an attention layer in one call."""
        linears = _first(linears_of(module, QKV, kind) for kind in _KINDS)
        layers = None if linears is None else self._packer.pack(linears)
        if layers is None:
            return
        shared = SharedInput(self._linear(self._count(layers)))
        for index, name in enumerate(QKV):
            setattr(module, name, SharedInputLinear(shared, index))
        self.done.shared_inputs += 1

    def replace_mlp(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Compute gate, activation and up of an MLP together, if it has no other parts."""
        linears = _first(
            find(module, kind) for kind in _KINDS for find in (gated_linears, joined_gated_linears)
        )
        if linears is None:
            return
        gate, up, down = linears
        function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        activation = find_activation(function)
        kind = type(module), activation
        if kind in self._refused:
            return
        if activation is None:
            joined = self._packer.pack_gated(gate, up)
        else:
            joined = self._packer.pack([gate, up])
        last = self._packer.pack([down])
        if joined is None or last is None:
            return
        # A part of a sum over ranks is not rounded before it is added.
        out_dtype = torch.float32 if isinstance(parent, SummedOutput) else self._dtype
        fused = self._gated_mlp(joined, activation, last, out_dtype)
        if kind not in self._proven and not self._agrees(module, fused, gate.in_features):
            self._refused.add(kind)
            return
        self._proven.add(kind)
        self._count(joined)
        self._count(last)
        setattr(parent, name, fused)
        self.done.gated_mlps += 1

    def _gated_mlp(
        self,
        joined: PackedLayers,
        activation: Activation | None,
        last: PackedLayers,
        out_dtype: torch.dtype,
    ) -> nn.Module:
        """Gate and up, SiLU or another activation, and down."""
        gate_up, down = self._linear(joined), self._kernels.linear(last, self._dtype, out_dtype)
        if activation is None:
            return GatedMLP(gate_up, down)
        return ActivatedMLP(gate_up, activation, self._kernels.elements, down)

    def replace_linear(
        self,
        parent: nn.Module,
        name: str,
        module: nn.Module,
        embeddings: dict[torch.Tensor, Place],
        out_dtype: torch.dtype,
    ) -> None:
        """Pack one layer, and let an embedding with the same weight read the packed one."""
        if type(module) not in (*_KINDS, Conv1D):
            return
        layers = self._packer.pack_alone(parent, module)
        if layers is None:
            self.done.kept += 1
            return
        linear = self._kernels.linear(self._count(layers), self._dtype, out_dtype)
        setattr(parent, name, PackedLinear(linear))
        self.done.packed += 1
        if isinstance(module, QuantizedLinear):  # a tied embedding keeps its own
            return
        parameter: Any = module.weight
        tied = embeddings.get(parameter)
        if tied is None:
            return
        owner, place, embedding = tied
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            setattr(owner, place, PackedEmbedding(layers, self._dtype))
            self.done.embeddings_shared += 1
        else:  # it does more than look up, and keeps its own
            self.done.embeddings_copied += 1

    def replace_norm(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace an RMS normalization, or one by mean and variance."""
        dtype = self._dtype
        root_mean_square, by_variance = norm_factors(module), layer_norm_terms(module)
        if root_mean_square is not None:
            epsilon, factors = root_mean_square
            for factor in factors:  # its weight, or 1 + its weight
                if len(factor) % PANEL == 0:
                    norm = self._kernels.rms_norm(factor, epsilon, dtype)
                    if self._put_norm(parent, name, module, FusedNorm(norm, factor)):
                        return
        elif by_variance is not None:
            epsilon, weight, bias = by_variance
            if len(weight) % PANEL == 0:
                norm = self._kernels.layer_norm(weight, bias, epsilon, dtype)
                self._put_norm(parent, name, module, FusedNorm(norm, weight, bias))

    def _put_norm(self, parent: nn.Module, name: str, module: nn.Module, fused: FusedNorm) -> bool:
        """Replace the module if both compute the same; whether they do. The rows' mean is not 0."""
        width = len(fused.weight)
        if not agrees(module, fused, width, self._dtype, _CPU, mean=1.0):
            return False
        setattr(parent, name, fused)
        self.done.norms += 1
        return True

    def replace_activation(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace an activation outside gated MLPs."""
        activation = find_activation(module)
        if activation is None or self._dtype not in self._kernels.dtypes:
            return
        fused = FusedActivation(activation, self._kernels.elements, module, self._dtype)
        if self._agrees(module, fused, PANEL):
            setattr(parent, name, fused)
            self.done.activations += 1

    def _agrees(self, own: nn.Module, fused: nn.Module, num_features: int) -> bool:
        def rounded(rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = fused(rows)
            return found.to(self._dtype)

        return agrees(own, rounded, num_features, self._dtype, _CPU)

    def _linear(self, layers: PackedLayers) -> CpuLinear:
        return self._kernels.linear(layers, self._dtype)

    def _count(self, layers: PackedLayers) -> PackedLayers:
        self.done.layers.append(layers)
        if self._dtype != torch.bfloat16:
            self.done.narrow += layers.weight.dtype == torch.bfloat16
        self.done.quantized += layers.form is not None
        if layers.form is not None:
            self.done.products.add(layers.form.products.name.lower())
        else:
            pairs = self._dtype == torch.bfloat16 and self._kernels.instructions.dot.of_pairs
            self.done.products.add("bfloat16" if pairs else "float32")
        return layers


def _first(found: Iterable[list[Any] | None]) -> list[Any] | None:
    """The first that is not None."""
    return next((each for each in found if each is not None), None)


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer whose outputs are logits, if the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    found: nn.Module | None = None if find is None else find()
    return found


def _tied_embeddings(model: nn.Module) -> dict[torch.Tensor, Place]:
    """Embeddings by their weight."""
    return {
        child.weight: (parent, name, child)
        for parent, name, child in places(model)
        if isinstance(child, nn.Embedding)
    }
