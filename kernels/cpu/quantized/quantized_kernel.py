"""The CPU kernel of linear layers over quantized weights: tasks of linear_kernel with other sums.

With the dot product of bytes, rows that are rounded to 8 bits are multiplied by codes as they are,
or with no more than a mask. Without that instruction, in float32, and for rows that are not
rounded, weights are dequantized: in registers for few rows, for many rows once for all to scratch
memory.
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
from kernels.cpu.quantized.float_products_ir import dequantize_panels
from kernels.cpu.quantized.input_rounding_ir import (
    GROUP_NUMBER_BYTES,
    largest_input,
    round_inputs,
)
from kernels.cpu.quantized.packed_format import STEP_INPUTS, PackedFormat, Products, Rounding
from kernels.cpu.quantized.products_ir import accumulate_quantized
from kernels.cpu.quantized.quantized_ir import (
    Tags,
    eight_bit_tag,
    emulated_half_tag,
    four_bit_tag,
    half_tag,
    minimums_tag,
    no_minimums_tag,
    rounded_groups_tag,
    rounded_rows_tag,
    unrounded_tag,
)
from kernels.cpu.runtime.bf16_dot import emulated_int8_dot_tag, int8_dot_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.instruction_set import Instructions
from kernels.cpu.runtime.memory import field, item_bytes
from kernels.cpu.runtime.simd import float32_tag

# Inputs whose largest is smaller are rounded to zeros.
_SMALLEST = np.float32(2.0**-100)
_LARGEST_CODE = np.float32(127.0)
_ROUNDING_TAGS = {
    Rounding.NONE: unrounded_tag,
    Rounding.ROWS: rounded_rows_tag,
    Rounding.GROUPS: rounded_groups_tag,
}


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
    tags = Tags(*weight_tag.types)
    if not tags.rounds_inputs:

        def widen(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
            widen_rows(tag, x, x_stride, target, rows, in_features)

        return widen
    of_rows, is_float = tags.rounds_rows, operand_tag == types.float32

    def prepare(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
        size = field(args, fields.GROUP_INPUTS)
        groups = in_features // size
        for r in range(rows):
            x_at, numbers = x + r * x_stride, target + r * prepared_stride(in_features)
            out = numbers if is_float else numbers + groups * GROUP_NUMBER_BYTES
            if of_rows:
                scale, inverse = _scale_of(tag, x_at, in_features)
            for group in range(groups):
                at = x_at + group * size * item_bytes(tag)
                if not of_rows:
                    scale, inverse = _scale_of(tag, at, size)
                round_inputs(tag, weight_tag, operand_tag, at, size, inverse, scale, numbers, out)
                numbers += GROUP_NUMBER_BYTES
                out += 4 * size if is_float else size

    return prepare


@njit
def _scale_of(tag, x, count):
    """With which the largest magnitude becomes 127, and the factor that does so."""
    largest = largest_input(tag, x, count)
    inverse = np.float32(0.0)
    if not largest <= _SMALLEST:  # true for NaN
        inverse = _LARGEST_CODE / largest
    return largest / _LARGEST_CODE, inverse


@overload(sum_group)
def _choose_sums(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
    if not is_quantized(weight_tag):
        return None
    sum_few = _sum_few_wide if registers == types.int16 else _sum_few_narrow
    sum_many = _sum_dequantized if operand_tag == types.float32 else _sum_integers

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
def _sum_few_wide(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    if rows == 1:
        accumulate_quantized(
            weight_tag, operand_tag, 1, 4, 0, x, x_stride, w, 0, groups, steps, tile, row
        )
    else:
        accumulate_quantized(
            weight_tag, operand_tag, 4, 4, rows - 1, x, x_stride, w, 0, groups, steps, tile, row
        )


@njit
def _sum_few_narrow(weight_tag, operand_tag, rows, x, x_stride, w, groups, steps, tile):
    row = fields.TILE_ROW
    for panel in range(fields.GROUP):
        out = tile + 4 * panel * fields.PANEL
        if rows == 1:
            accumulate_quantized(
                weight_tag, operand_tag, 1, 1, 0, x, x_stride, w, panel, groups, steps, out, row
            )
        else:
            accumulate_quantized(
                weight_tag, operand_tag, 4, 1, rows - 1, x, x_stride, w, panel, groups, steps, out,
                row,
            )  # fmt: skip


@njit
def _sum_integers(
    args, weight_tag, operand_tag, registers, group, rows, x, x_stride, w, groups, steps, tile
):
    row = fields.TILE_ROW
    for panel in range(0, fields.GROUP, 2):
        out = tile + 4 * panel * fields.PANEL
        for r in range(0, rows, 8):
            accumulate_quantized(
                weight_tag, operand_tag, 8, 2, rows - r - 1, x + r * x_stride, x_stride, w, panel,
                groups, steps, out + r * row, row,
            )  # fmt: skip


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
        _ROUNDING_TAGS[form.rounding],
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
