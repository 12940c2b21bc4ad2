"""The CPU kernel of linear layers over quantized weights: tasks of linear_kernel with other sums.

With the dot product of bytes, rows are rounded to 16 bits (bfloat16 has 8) with a scale for each
group of inputs, and integers are multiplied: codes need no more than a mask. Rows of layers whose
format says so are rounded to 8 bits. Without that instruction, and in float32, weights are
dequantized: in registers for few rows, for many rows once for all to scratch memory.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.linear_kernel import (
    clear,
    groups_until_next,
    is_quantized,
    linear_tasks,
    multiply,
    narrow_registers,
    prepare_rows,
    prepared_stride,
    prepares_rows,
    sum_group,
    wide_registers,
    widen_rows,
)
from kernels.cpu.quantized.float_products_ir import accumulate_dequantized, dequantize_panels
from kernels.cpu.quantized.integer_products_ir import (
    BYTES,
    GROUP_NUMBER_BYTES,
    HIGH_LOW,
    WORDS,
    accumulate_integers,
    largest_input,
    power_of_two,
    round_inputs,
    round_to_scale,
)
from kernels.cpu.quantized.packed_format import STEP_INPUTS, PackedFormat, Products
from kernels.cpu.quantized.quantized_ir import (
    Tags,
    eight_bit_tag,
    emulated_half_tag,
    four_bit_tag,
    half_tag,
    minimums_tag,
    no_minimums_tag,
    rounded_tag,
    unrounded_tag,
)
from kernels.cpu.runtime.bf16_dot import emulated_int8_dot_tag, int8_dot_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.instruction_set import Instructions
from kernels.cpu.runtime.memory import field, item_bytes
from kernels.cpu.runtime.simd import float32_tag

# Groups of inputs whose largest is smaller are rounded to zeros.
_SMALLEST = np.float32(2.0**-100)
_LARGEST_CODE = np.float32(127.0)
# The largest magnitude in 16 bits is below 2**15 - 128, so that its high byte is no more than 127.
_HIGHEST_BIT = np.float32(2.0**14)
_CARRIED = np.float32(1 + 2.0**-7)


@overload(prepares_rows)
def _choose_whether(weight_tag, operand_tag, tag):
    if not is_quantized(weight_tag):
        return None
    prepares = Tags(*weight_tag.types).rounds_inputs or tag != operand_tag

    def chosen(weight_tag, operand_tag, tag):
        return prepares

    return chosen


@overload(prepare_rows)
def _choose_preparation(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
    if not is_quantized(weight_tag):
        return None
    rounds_inputs = Tags(*weight_tag.types).rounds_inputs
    if operand_tag == types.float32:
        prepare_floats = _round_to_scales if rounds_inputs else widen_rows

        def prepare(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
            prepare_floats(tag, x, x_stride, target, rows, in_features)

        return prepare
    prepare_row = _prepare_8_bits if rounds_inputs else _prepare_16_bits

    def prepare_bytes(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
        size = field(args, fields.GROUP_INPUTS)
        for r in range(rows):
            out = target + r * prepared_stride(in_features)
            prepare_row(tag, weight_tag, rows, x + r * x_stride, in_features, size, out)

    return prepare_bytes


@njit
def _prepare_16_bits(tag, weight_tag, rows, x, in_features, size, out):
    groups = in_features // size
    for group in range(groups):
        at = x + group * size * item_bytes(tag)
        largest = largest_input(tag, at, size)
        scale = inverse = np.float32(0.0)
        if not largest <= _SMALLEST:  # true for NaN
            power = power_of_two(largest * _CARRIED)
            inverse = _HIGHEST_BIT / power
            scale = power / _HIGHEST_BIT + (largest - largest)
        target = out + groups * GROUP_NUMBER_BYTES + 2 * group * size
        numbers = out + group * GROUP_NUMBER_BYTES
        if rows == 1:
            round_inputs(tag, weight_tag, HIGH_LOW, at, size, inverse, scale, numbers, target)
        else:
            round_inputs(tag, weight_tag, WORDS, at, size, inverse, scale, numbers, target)


@njit
def _prepare_8_bits(tag, weight_tag, rows, x, in_features, size, out):
    groups = in_features // size
    scale, inverse = _scale_of_row(tag, x, in_features)
    for group in range(groups):
        at = x + group * size * item_bytes(tag)
        target = out + groups * GROUP_NUMBER_BYTES + group * size
        numbers = out + group * GROUP_NUMBER_BYTES
        round_inputs(tag, weight_tag, BYTES, at, size, inverse, scale, numbers, target)


@njit
def _round_to_scales(tag, x, x_stride, target, rows, in_features):
    for r in range(rows):
        at = x + r * x_stride
        scale, inverse = _scale_of_row(tag, at, in_features)
        out = target + r * prepared_stride(in_features)
        round_to_scale(tag, at, in_features, inverse, scale, out)


@njit
def _scale_of_row(tag, x, in_features):
    """With which the largest magnitude becomes 127, and the factor that does so."""
    largest = largest_input(tag, x, in_features)
    inverse = np.float32(0.0)
    if not largest <= np.float32(0.0):
        inverse = _LARGEST_CODE / largest
    return largest / _LARGEST_CODE, inverse


@overload(sum_group)
def _choose_sums(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
    if not is_quantized(weight_tag):
        return None
    if operand_tag == types.float32:
        sum_few = _sum_few_wide if registers == types.int16 else _sum_few_narrow
        sum_many = _sum_dequantized
    else:
        is_bytes = Tags(*weight_tag.types).rounds_inputs
        sum_few = _sum_few_bytes if is_bytes else _sum_few_words
        sum_many = _sum_bytes if is_bytes else _sum_words

    def chosen(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
        clear(tile, rows)
        w = field(args, fields.WEIGHT) + group * field(args, fields.TASK_BYTES)
        groups = field(args, fields.IN_FEATURES) // field(args, fields.GROUP_INPUTS)
        steps = field(args, fields.GROUP_INPUTS) // STEP_INPUTS
        if rows <= fields.FEW_QUANTIZED_ROWS:
            sum_few(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile)
        else:
            sum_many(
                args, weight_tag, operand_tag, registers, group, rows, x, x_stride, w, groups,
                steps, tile,
            )  # fmt: skip

    return chosen


@njit
def _sum_few_words(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    if rows == 1:
        accumulate_integers(
            weight_tag, operand_tag, HIGH_LOW, 1, 4, 0, x, x_stride, w, 0, groups, steps, tile, row
        )
    else:
        accumulate_integers(
            weight_tag, operand_tag, WORDS, 4, 4, rows - 1, x, x_stride, w, 0, groups, steps, tile,
            row,
        )  # fmt: skip


@njit
def _sum_few_bytes(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    if rows == 1:
        accumulate_integers(
            weight_tag, operand_tag, BYTES, 1, 4, 0, x, x_stride, w, 0, groups, steps, tile, row
        )
    else:
        accumulate_integers(
            weight_tag, operand_tag, BYTES, 4, 4, rows - 1, x, x_stride, w, 0, groups, steps, tile,
            row,
        )  # fmt: skip


@njit
def _sum_words(
    args, weight_tag, operand_tag, registers, group, rows, x, x_stride, w, groups, steps, tile
):
    row = fields.TILE_ROW
    for panel in range(0, fields.GROUP, 2):
        out = tile + 4 * panel * fields.PANEL
        r = 0
        while r < rows:
            at, o, left = x + r * x_stride, out + r * row, rows - r
            if left > 16 or 8 < left <= 12:  # thirteen to sixteen rows are two blocks of eight
                accumulate_integers(
                    weight_tag, operand_tag, WORDS, 12, 2, left - 1, at, x_stride, w, panel, groups,
                    steps, o, row,
                )  # fmt: skip
                r += 12
            else:
                accumulate_integers(
                    weight_tag, operand_tag, WORDS, 8, 2, left - 1, at, x_stride, w, panel, groups,
                    steps, o, row,
                )  # fmt: skip
                r += 8


@njit
def _sum_bytes(
    args, weight_tag, operand_tag, registers, group, rows, x, x_stride, w, groups, steps, tile
):
    row = fields.TILE_ROW
    for panel in range(0, fields.GROUP, 2):
        out = tile + 4 * panel * fields.PANEL
        r = 0
        while r < rows:
            at, o, left = x + r * x_stride, out + r * row, rows - r
            if left > 16 or 8 < left <= 12:
                accumulate_integers(
                    weight_tag, operand_tag, BYTES, 12, 2, left - 1, at, x_stride, w, panel, groups,
                    steps, o, row,
                )  # fmt: skip
                r += 12
            else:
                accumulate_integers(
                    weight_tag, operand_tag, BYTES, 8, 2, left - 1, at, x_stride, w, panel, groups,
                    steps, o, row,
                )  # fmt: skip
                r += 8


@njit
def _sum_few_wide(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    if rows == 1:
        accumulate_dequantized(weight_tag, 1, 4, 0, x, x_stride, w, 0, groups, steps, tile, row)
    else:
        accumulate_dequantized(
            weight_tag, 4, 4, rows - 1, x, x_stride, w, 0, groups, steps, tile, row
        )


@njit
def _sum_few_narrow(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    for panel in range(fields.GROUP):
        out = tile + 4 * panel * fields.PANEL
        if rows == 1:
            accumulate_dequantized(
                weight_tag, 1, 1, 0, x, x_stride, w, panel, groups, steps, out, row
            )
        else:
            accumulate_dequantized(
                weight_tag, 4, 1, rows - 1, x, x_stride, w, panel, groups, steps, out, row
            )


@njit
def _sum_dequantized(
    args, weight_tag, operand_tag, registers, group, rows, x, x_stride, w, groups, steps, tile
):
    in_features = field(args, fields.IN_FEATURES)
    size, group_bytes = field(args, fields.GROUP_INPUTS), field(args, fields.GROUP_BYTES)
    header_bytes = field(args, fields.HEADER_BYTES)
    weights = tile + field(args, fields.SCRATCH_BYTES) - fields.WIDENED_BYTES
    code_bytes = (group_bytes - header_bytes) // size  # of an input
    begin = 0
    while begin < in_features:
        depth = min(fields.DEPTH, size - begin % size)
        if size <= fields.DEPTH:
            depth = min(fields.DEPTH // size * size, in_features - begin)
        stride = 4 * fields.PANEL * depth
        for at in range(begin, begin + depth, size):
            inside = at % size
            header = w + at // size * group_bytes
            codes = header + header_bytes + inside * code_bytes
            target = weights + 4 * fields.PANEL * (at - begin)
            count = min(size - inside, depth) // STEP_INPUTS
            for panel in range(fields.GROUP):
                dequantize_panels(weight_tag, 1, header, codes, panel, count, target, stride)
        x_at = x + 4 * begin
        begin += depth
        then = w + begin // size * group_bytes
        if begin >= in_features:
            then = w + groups_until_next(args, group) * field(args, fields.TASK_BYTES)
        multiply(
            registers, float32_tag, operand_tag, rows, x_at, x_stride, weights, stride, depth // 2,
            then, tile,
        )  # fmt: skip


@cache
def quantized_kernel(form: PackedFormat, dtype: torch.dtype, instructions: Instructions) -> Kernel:
    """Linear layers with packed weights of a format, inputs and outputs of a type."""
    operand_tag: Any = float32_tag
    if form.products != Products.FLOAT32:
        operand_tag = int8_dot_tag if instructions.int8_dot else emulated_int8_dot_tag
    scale_tag: Any = float32_tag
    if form.half_scales:
        scale_tag = half_tag if instructions.wide else emulated_half_tag
    weight_tag = (
        four_bit_tag if form.bits == 4 else eight_bit_tag,
        scale_tag,
        minimums_tag if form.has_minimums else no_minimums_tag,
        rounded_tag if form.rounds_inputs else unrounded_tag,
    )
    registers = wide_registers if instructions.wide else narrow_registers
    return compile_kernel(
        linear_tasks,
        fields.LINEAR_LAYOUT,
        weight_tag,
        operand_tag,
        element_tag(dtype),
        registers,
    )
