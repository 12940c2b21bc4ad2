"""Weights of an output layer in eight bits, and how far they are from the weights themselves."""

from dataclasses import dataclass

import torch

from kernels.cpu.linear.linear_arguments import GROUP_OUTPUTS, PANEL
from kernels.cpu.linear.weight_packing import PackedLayers, on_large_pages
from kernels.cpu.sampling.pruned_argmax_arguments import MOVED

# Fewer are computed faster than they are screened.
_LEAST_OUTPUTS = 2048
# The sum of so many products of codes is an int32.
_MOST_INPUTS = 32768
_MOST_SIZE = 1e15  # of weights, so that no product leaves the range of float32
_LARGEST_CODE = 127
# By how much float32 may have rounded: norms, and sums of a few terms.
_ROUNDING = 1e-5
# And by how much where squares, or sums in the kernels, are too small for it.
_UNDERFLOW = 1e-15
_PANELS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class ScreenWeights:
    """Codes of an output layer.

    The weights [N, K] are ``scales`` * (codes - MOVED), but for an error.

    Attributes:
        codes: [panels, K / 4, 16, 4] uint8.
        scales: [N] float32, filled up with ones to whole groups of panels, as are:
        errors: [N] float32. The layer's outputs, as its kernels compute them, differ from exact
            products of the input and the codes' weights by no more than this, times the input's
            norm.
        norms: [N] float32, no less than those of the codes' weights.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    errors: torch.Tensor
    norms: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of all that."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.errors, self.norms))


def can_screen(layers: PackedLayers) -> bool:
    """Whether the likeliest outputs can be found by codes."""
    return (
        layers.weight.dtype == torch.bfloat16
        and not layers.gated
        and layers.biases == (None,)
        and layers.out_features[0] >= _LEAST_OUTPUTS
        and layers.in_features <= _MOST_INPUTS
    )


def pack_for_screening(layers: PackedLayers) -> ScreenWeights | None:
    """Codes of an output layer; None: it has weights that are no numbers, or too large.

    Args:
        layers: one that ``can_screen``.
    """
    num_inputs = layers.in_features
    num_outputs = layers.groups[0] * GROUP_OUTPUTS
    panels = layers.weight.view(-1, num_inputs // 2, PANEL, 2)
    codes = on_large_pages(torch.empty(len(panels), num_inputs // 4, PANEL, 4, dtype=torch.uint8))
    scales, errors, norms = torch.ones(3, num_outputs)
    # The kernels sum in float32, one product after the other.
    of_size = num_inputs * 2.0**-23 + _ROUNDING
    for first in range(0, len(panels), _PANELS_AT_ONCE):
        some = slice(first, first + _PANELS_AT_ONCE)
        weights = panels[some].permute(0, 2, 1, 3).reshape(-1, num_inputs).float()
        at = slice(first * PANEL, first * PANEL + len(weights))
        scale = weights.abs().amax(1) / _LARGEST_CODE
        scale[scale == 0] = 1
        sizes = weights.norm(dim=1)
        if not bool((sizes <= _MOST_SIZE).all()):
            return None
        rounded = (weights / scale[:, None]).round_()
        in_panels = rounded.view(-1, PANEL, num_inputs // 4, 4).permute(0, 2, 1, 3)
        codes[some] = (in_panels + MOVED).to(torch.uint8)
        by_codes = rounded.mul_(scale[:, None])
        scales[at] = scale
        norms[at] = by_codes.norm(dim=1) * (1 + _ROUNDING)
        error = (weights - by_codes).norm(dim=1) * (1 + _ROUNDING)
        errors[at] = error + sizes * of_size + _UNDERFLOW
    return ScreenWeights(codes, scales, errors, norms)
