"""Weights in the order in which the kernels of linear layers read them."""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.linear.linear_arguments import GROUP_OUTPUTS, PANEL
from kernels.cpu.quantized.packed_format import PackedFormat

# Rows are widened and packed in whole vectors.
_INPUTS_MULTIPLE = 16
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """One layer, or layers that share their input, in panels of sixteen outputs.

    Weights in bfloat16 are [panels, K / 2, 16, 2], so that a pair of inputs of an output is one
    32-bit number; in float32 [panels, K, 16]. Each layer is padded with zeros to whole groups of
    panels.

    Attributes:
        weight: packed.
        biases: [groups * GROUP_OUTPUTS] float32 of each layer, None for those without.
        in_features: K.
        out_features: of each layer, as its caller sees it.
        gated: one layer whose panels alternate between gate and up.
        form: of quantized weights, which are bytes (see packed_format); None: they are as above.
    """

    weight: torch.Tensor
    biases: tuple[torch.Tensor | None, ...]
    in_features: int
    out_features: tuple[int, ...]
    gated: bool
    form: PackedFormat | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups of each layer."""
        factor = 2 if self.gated else 1
        return tuple(-(-factor * n // GROUP_OUTPUTS) for n in self.out_features)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] is of a shape and type that the kernels take."""
    supported = weight.dtype in (torch.float32, torch.bfloat16)
    return supported and weight.dim() == 2 and weight.shape[1] % _INPUTS_MULTIPLE == 0


def can_gate(weight: torch.Tensor) -> bool:
    """Whether a gate's weight [N, K] can be packed together with up's."""
    return can_pack(weight) and weight.shape[0] % PANEL == 0


def pack(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] | None = None
) -> PackedLayers:
    """Pack weights [N, K] of one type, one for each of the layers that share their input."""
    if biases is None:
        biases = [None] * len(weights)
    narrow = all(map(is_narrow, weights))
    packed = torch.cat([_panels(weight, narrow) for weight in weights])
    return PackedLayers(
        on_large_pages(packed),
        tuple(bias if bias is None else padded_bias(bias) for bias in biases),
        weights[0].shape[1],
        tuple(len(weight) for weight in weights),
        gated=False,
    )


def pack_gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PackedLayers:
    """Pack the weights [N, K] of gate and up; N is a multiple of 16."""
    out_features, in_features = gate.shape
    narrow = is_narrow(gate) and is_narrow(up)
    joined = torch.stack(
        [gate.view(-1, PANEL, in_features), up.view(-1, PANEL, in_features)], dim=1
    ).view(-1, in_features)
    bias = None
    if biases is not None:
        bias = torch.stack([part.view(-1, PANEL) for part in biases], dim=1).flatten()
        bias = padded_bias(bias)
    weight = on_large_pages(_panels(joined, narrow))
    return PackedLayers(weight, (bias,), in_features, (out_features,), gated=True)


def is_narrow(weight: torch.Tensor) -> bool:
    """Whether bfloat16 holds the weight without loss, as it does if it was stored in bfloat16."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight)


def _panels(weight: torch.Tensor, narrow: bool) -> torch.Tensor:
    out_features, in_features = weight.shape
    groups = -(-out_features // GROUP_OUTPUTS)
    dtype = torch.bfloat16 if narrow else torch.float32
    padded = torch.zeros(groups * GROUP_OUTPUTS, in_features, dtype=dtype)
    padded[:out_features] = weight
    if narrow:
        return padded.view(-1, PANEL, in_features // 2, 2).permute(0, 2, 1, 3)
    return padded.view(-1, PANEL, in_features).permute(0, 2, 1)


def padded_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias in float32, filled up with zeros to whole groups of panels."""
    padded = torch.zeros(-(-len(bias) // GROUP_OUTPUTS) * GROUP_OUTPUTS)
    padded[: len(bias)] = bias
    return padded


def on_large_pages(weight: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, on huge pages if the system has some.

    Every step reads all weights: with larger pages there are fewer TLB misses.
    """
    if weight.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return weight.contiguous()
    size = -(-weight.nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    # Private: by default Linux backs shared memory with small pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
    # A system without huge pages refuses the advice, and pages are small.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    first = -everything.data_ptr() % _HUGE_PAGE_BYTES
    copy = everything[first : first + weight.nbytes].view(weight.dtype).view(weight.shape)
    return copy.copy_(weight)
