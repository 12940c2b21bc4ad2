"""Weights of an output layer quantized to eight bits, with bounds of the quantization errors."""

from dataclasses import dataclass

import torch

from kernels.cpu.linear.linear_arguments import GROUP_OUTPUTS, PANEL
from kernels.cpu.linear.weight_packing import PackedLayers, on_large_pages
from kernels.cpu.sampling.pruned_argmax_arguments import ZERO_POINT

# Fewer outputs are computed faster than they are pruned.
_MIN_OUTPUTS = 2048
# The sum of so many products of quantized numbers fits an int32.
_MAX_INPUTS = 32768
_MAX_NORM = 1e15  # of weights, so that no product leaves the range of float32
_LARGEST = 127
# Rounding in float32 of norms, and of sums of a few terms.
_ROUNDING = 1e-5
# The same where squares, or sums in the kernels, are below the normal range.
_UNDERFLOW = 1e-15
_PANELS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Quantized weights of an output layer.

    The weights [N, K] are ``scales`` * (quantized - ZERO_POINT), up to an error.

    Attributes:
        quantized: [panels, K / 4, 16, 4] uint8.
        scales: [N] float32, filled up with ones to whole groups of panels, as are:
        errors: [N] float32. The layer's outputs, as its kernels compute them, differ from exact
            products of the input and the dequantized weights by no more than this, times the
            input's norm.
        norms: [N] float32, no less than those of the dequantized weights.
    """

    quantized: torch.Tensor
    scales: torch.Tensor
    errors: torch.Tensor
    norms: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(each.nbytes for each in (self.quantized, self.scales, self.errors, self.norms))


def can_quantize(layers: PackedLayers) -> bool:
    """Whether the pruned argmax serves a layer."""
    return (
        layers.weight.dtype == torch.bfloat16
        and not layers.gated
        and layers.biases == (None,)
        and layers.out_features[0] >= _MIN_OUTPUTS
        and layers.in_features <= _MAX_INPUTS
    )


def quantize_weights(layers: PackedLayers) -> QuantizedWeights | None:
    """Quantize the weights of an output layer; None: some are not finite, or too large.

    Args:
        layers: one that ``can_quantize``.
    """
    num_inputs = layers.in_features
    num_outputs = layers.groups[0] * GROUP_OUTPUTS
    panels = layers.weight.view(-1, num_inputs // 2, PANEL, 2)
    quantized = on_large_pages(
        torch.empty(len(panels), num_inputs // 4, PANEL, 4, dtype=torch.uint8)
    )
    scales, errors, norms = torch.ones(3, num_outputs)
    # The kernels sum in float32, one product after the other.
    of_norm = num_inputs * 2.0**-23 + _ROUNDING
    for first in range(0, len(panels), _PANELS_AT_ONCE):
        some = slice(first, first + _PANELS_AT_ONCE)
        weights = panels[some].permute(0, 2, 1, 3).reshape(-1, num_inputs).float()
        at = slice(first * PANEL, first * PANEL + len(weights))
        scale = weights.abs().amax(1) / _LARGEST
        scale[scale == 0] = 1
        sizes = weights.norm(dim=1)
        if not bool((sizes <= _MAX_NORM).all()):
            return None
        rounded = (weights / scale[:, None]).round_()
        in_panels = rounded.view(-1, PANEL, num_inputs // 4, 4).permute(0, 2, 1, 3)
        quantized[some] = (in_panels + ZERO_POINT).to(torch.uint8)
        dequantized = rounded.mul_(scale[:, None])
        scales[at] = scale
        norms[at] = dequantized.norm(dim=1) * (1 + _ROUNDING)
        error = (weights - dequantized).norm(dim=1) * (1 + _ROUNDING)
        errors[at] = error + sizes * of_norm + _UNDERFLOW
    return QuantizedWeights(quantized, scales, errors, norms)
