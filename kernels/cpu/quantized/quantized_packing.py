"""Quantized weights in the order in which the kernels of linear layers read them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.cpu.linear.linear_arguments import GROUP, GROUP_OUTPUTS, PANEL
from kernels.cpu.linear.weight_packing import PackedLayers, on_large_pages, padded_bias
from kernels.cpu.quantized.packed_format import STEP_INPUTS, PackedFormat, Products, Rounding
from kernels.cpu.runtime.instruction_set import Dot, Instructions
from kernels.quantized_weight import GROUP_MULTIPLE, QuantizedWeight

# Errors of scales and minimums in float16, for inputs in bfloat16: of their size in float16's
# normal range; and of the steps between values, where minimums are below it.
_HALF_ROUNDING = 2.0**-11
_OF_A_STEP = 2.0**-11


def multiplies_bytes(dtype: torch.dtype, instructions: Instructions) -> bool:
    """Whether kernels for inputs of a type multiply inputs in 8 bits by codes, as integers."""
    emulated = instructions.dot in (Dot.EMULATED, Dot.EMULATED_AMX)
    return dtype == torch.bfloat16 and (instructions.int8_dot or emulated)


def can_pack_quantized(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether kernels serve layers that share their input, with these weights."""
    formats = {(each.bits, each.group_size, each.input_group) for each in weights}
    return len(formats) == 1 and weights[0].group_size % GROUP_MULTIPLE == 0


def pack_quantized(
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    instructions: Instructions,
) -> PackedLayers:
    """Pack weights that ``can_pack_quantized``, one for each of the layers that share their input.

    Args:
        dtype: of inputs.
        instructions: that kernels may use.
    """
    form, weights = _format_of(weights, dtype, instructions)
    return PackedLayers(
        on_large_pages(torch.cat([_packed(each, form) for each in weights])),
        tuple(None if bias is None else padded_bias(bias) for bias in biases),
        weights[0].shape[1],
        tuple(each.shape[0] for each in weights),
        gated=False,
        form=form,
    )


def pack_quantized_gated(
    gate: QuantizedWeight,
    up: QuantizedWeight,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
    instructions: Instructions,
) -> PackedLayers:
    """The same for gate and up, whose panels alternate; N is a multiple of 16."""
    form, (gate, up) = _format_of([gate, up], dtype, instructions)
    out_features, in_features = gate.shape
    minimums = None
    if form.has_minimums:
        minimums = _alternating(_minimums_of(gate), _minimums_of(up))
    joined = QuantizedWeight(
        _alternating(gate.codes, up.codes),
        _alternating(gate.scales, up.scales),
        minimums,
        gate.bits,
        gate.group_size,
    )
    bias = None if biases is None else padded_bias(_alternating(*biases))
    weight = on_large_pages(_packed(joined, form))
    return PackedLayers(weight, (bias,), in_features, (out_features,), gated=True, form=form)


def _alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of one, then sixteen of the other."""
    parts = [each.unflatten(0, (-1, PANEL)) for each in (gate, up)]
    return torch.stack(parts, dim=1).flatten(0, 2)


def _minimums_of(weight: QuantizedWeight) -> torch.Tensor:
    return torch.zeros_like(weight.scales) if weight.minimums is None else weight.minimums


def _format_of(
    weights: Sequence[QuantizedWeight], dtype: torch.dtype, instructions: Instructions
) -> tuple[PackedFormat, list[QuantizedWeight]]:
    """The format, and the weights with its group size."""
    rounding, products = Rounding.NONE, Products.FLOAT32
    if weights[0].input_group is not None:
        rounding = Rounding.ROWS if weights[0].rounds_rows else Rounding.GROUPS
        products = Products.INT8 if multiplies_bytes(dtype, instructions) else products
    if rounding == Rounding.GROUPS:
        weights = [_with_input_groups(each) for each in weights]
    form = PackedFormat(
        weights[0].bits,
        weights[0].group_size,
        products,
        half_scales=all(_fits_half(each, exactly=dtype == torch.float32) for each in weights),
        has_minimums=any(each.minimums is not None for each in weights),
        rounding=rounding,
    )
    return form, list(weights)


def _with_input_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight, in which scales are repeated for each group of rounded inputs."""
    assert weight.input_group is not None
    times, minimums = weight.group_size // weight.input_group, weight.minimums
    return replace(
        weight,
        scales=weight.scales.repeat_interleave(times, 1),
        minimums=None if minimums is None else minimums.repeat_interleave(times, 1),
        group_size=weight.input_group,
    )


def _fits_half(weight: QuantizedWeight, *, exactly: bool) -> bool:
    """Whether float16 holds scales and minimums: exactly, or as well as bfloat16 inputs demand."""
    for numbers in (weight.scales, weight.minimums):
        if numbers is None:
            continue
        error = (numbers.half().float() - numbers).abs()  # NaN for what is infinite in float16
        most = (
            torch.zeros(())
            if exactly
            else torch.maximum(numbers.abs() * _HALF_ROUNDING, weight.scales.abs() * _OF_A_STEP)
        )
        if not bool((error <= most).all()):
            return False
    return True


def _packed(weight: QuantizedWeight, form: PackedFormat) -> torch.Tensor:
    """[groups of outputs, bytes] uint8."""
    out_features, in_features = weight.shape
    groups = -(-out_features // GROUP_OUTPUTS)
    input_groups = in_features // form.group_size
    found = torch.zeros(groups, input_groups, form.group_bytes, dtype=torch.uint8)
    headers, codes = found.split([form.header_bytes, form.group_bytes - form.header_bytes], 2)
    kind = torch.float16 if form.half_scales else torch.float32
    numbers = [weight.scales] + ([_minimums_of(weight)] if form.has_minimums else [])
    # [groups, input groups, scales or minimums, outputs]
    header = torch.zeros(groups, input_groups, len(numbers), GROUP_OUTPUTS, dtype=kind)
    for index, each in enumerate(numbers):
        padded = torch.zeros(groups * GROUP_OUTPUTS, input_groups, dtype=kind)
        padded[:out_features] = each
        header[:, :, index] = padded.view(groups, GROUP_OUTPUTS, input_groups).transpose(1, 2)
    headers.copy_(header.view(groups, input_groups, -1).view(torch.uint8))
    padded = torch.zeros(groups * GROUP_OUTPUTS, in_features, dtype=torch.int8)
    padded[:out_features] = weight.codes
    codes.copy_(_ordered(padded, form).reshape(groups, input_groups, -1))
    return found.view(groups, -1)


def _ordered(codes: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """Codes [N, K] in the order of the format, as bytes uint8."""
    steps = codes.shape[1] // STEP_INPUTS
    panels = codes.view(-1, GROUP, PANEL, steps, STEP_INPUTS)
    if form.products == Products.FLOAT32:
        # Each vector has one input of sixteen outputs; four bits of each are in every 32-bit lane.
        vectors: torch.Tensor = panels.permute(0, 3, 1, 4, 2).contiguous().view(torch.uint8)
        if form.bits == 8:
            return vectors
        nibbles = (vectors & 15).transpose(-1, -2)  # [group, step, panel, lane, vector]
        nibbles = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
        return nibbles.contiguous()
    # A lane has four inputs of an output, unsigned: in eight bits each, or in four bits beside the
    # next four inputs.
    fours: torch.Tensor = panels.view(-1, GROUP, PANEL, steps, 2, 4).permute(0, 3, 1, 4, 2, 5)
    fours = (fours.to(torch.int16) + 2 ** (form.bits - 1)).to(torch.uint8)
    return fours if form.bits == 8 else fours[:, :, :, 0] | (fours[:, :, :, 1] << 4)
