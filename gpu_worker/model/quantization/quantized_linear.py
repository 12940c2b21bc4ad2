"""A linear layer with a quantized weight, computed by plain torch on any device."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from kernels.quantized_weight import QuantizedWeight, fitting_group_size

_LARGEST_CODE = 127
# Inputs that are rounded with one scale: an outlier takes digits from so many others at most.
_MOST_GROUP_INPUTS = 64
# A weight is dequantized in pieces: all of it would take the memory that quantization has saved.
_WEIGHTS_AT_ONCE = 1 << 22


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight.

    The reference of all kernels for such layers, and what devices without them run. Weights are
    dequantized in float32 and rounded to the input's type; where inputs are rounded to int8, all is
    in float32.

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
        self._format = quantized.bits, quantized.group_size, quantized.input_group
        self.register_buffer("codes", quantized.codes, persistent=False)
        self.register_buffer("scales", quantized.scales, persistent=False)
        self.register_buffer("minimums", quantized.minimums, persistent=False)

    @property
    def quantized(self) -> QuantizedWeight:
        """Its weight [N, K]."""
        return QuantizedWeight(self.codes, self.scales, self.minimums, *self._format)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to int8."""
        return self._format[2] is not None

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N] of the input's type."""
        weight = self.quantized
        rows = x
        if weight.input_group is not None:
            codes, scales = quantize_groups(x, weight.input_group)
            rows = (codes * scales).flatten(-2)
        step = max(1, _WEIGHTS_AT_ONCE // self.in_features)
        parts = [
            functional.linear(rows, weight.rows(begin, begin + step).dequantize().to(rows.dtype))
            for begin in range(0, self.out_features, step)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.bias is not None:
            out += self.bias.to(out.dtype)
        return out.to(x.dtype)

    def round_inputs(self) -> None:
        """Let inputs be rounded to int8 in small groups, if they are not rounded already."""
        bits, group_size, input_group = self._format
        if input_group is None:
            input_group = fitting_group_size(group_size, _MOST_GROUP_INPUTS)
            self._format = bits, group_size, input_group

    def extra_repr(self) -> str:
        """Its format, for the model's description."""
        bits, group_size, input_group = self._format
        form = f"in_features={self.in_features}, out_features={self.out_features}, bits={bits}"
        return f"{form}, group_size={group_size}, input_group={input_group}"

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


def quantize_groups(
    x: torch.Tensor,  # [..., K]
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., groups, group_size] from -127 to 127 as float32, and scales [..., groups, 1]."""
    x = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size).float()
    largest = x.abs().amax(-1, keepdim=True)
    # A number divided by a tensor would be the number times the tensor's reciprocal, and rounded
    # twice: kernels round once.
    inverse = torch.where(largest == 0, 0.0, largest.new_tensor(_LARGEST_CODE) / largest)
    return (x * inverse).round_(), largest / _LARGEST_CODE
