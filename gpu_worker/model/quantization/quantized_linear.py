"""A linear layer with a quantized weight, computed by plain torch on any device."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from kernels.quantized_weight import QuantizedWeight

_LARGEST_CODE = 127
# A weight is dequantized in pieces: all of it would take the memory that quantization has saved.
_WEIGHTS_AT_ONCE = 1 << 22


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight.

    The reference of all kernels for such layers, and what devices without them run. Weights are
    dequantized in float32 and rounded to the input's type; with ``int8_activations`` all is in
    float32.

    Args:
        quantized: its weight [N, K].
        bias: [N].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = quantized.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._format = quantized.bits, quantized.group_size, quantized.int8_activations
        self.register_buffer("codes", quantized.codes, persistent=False)
        self.register_buffer("scales", quantized.scales, persistent=False)
        self.register_buffer("minimums", quantized.minimums, persistent=False)

    @property
    def quantized(self) -> QuantizedWeight:
        """Its weight [N, K]."""
        return QuantizedWeight(self.codes, self.scales, self.minimums, *self._format)

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N] of the input's type."""
        weight = self.quantized
        rows = x
        if weight.int8_activations:
            codes, scales = quantize_rows(x)
            rows = codes * scales
        step = max(1, _WEIGHTS_AT_ONCE // self.in_features)
        parts = [
            functional.linear(rows, weight.rows(begin, begin + step).dequantize().to(rows.dtype))
            for begin in range(0, self.out_features, step)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.bias is not None:
            out += self.bias.to(out.dtype)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        """Its format, for the model's description."""
        bits, group_size, int8_activations = self._format
        form = f"in_features={self.in_features}, out_features={self.out_features}, bits={bits}"
        return f"{form}, group_size={group_size}, int8_activations={int8_activations}"

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "QuantizedLinear":
        """Scales stay float32 where the model's other numbers get another type."""
        exact = self.scales, self.minimums
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype != torch.float32:
            scales, minimums = exact
            self.scales = scales.to(self.codes.device)
            self.minimums = None if minimums is None else minimums.to(self.codes.device)
        return self


def quantize_rows(
    x: torch.Tensor,  # [..., K]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K] from -127 to 127 as float32, and the scale [..., 1] of each row."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, _LARGEST_CODE / largest)
    return (x * inverse).round_(), largest / _LARGEST_CODE
