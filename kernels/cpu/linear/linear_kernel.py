"""The CPU kernel of linear layers: threads claim groups of outputs until none is left.

A task is a group of panels of outputs for a chunk of rows. Sums are in the thread's scratch memory;
when all inputs are summed, the epilogue follows.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.amx_linear_kernel import amx_linear_tasks
from kernels.cpu.linear.epilogue import finish
from kernels.cpu.linear.library_blocks import multiply_by_library, rows_by_library
from kernels.cpu.linear.linear_ir import (
    ITS_OWN,
    NOTHING,
    accumulate,
    clear_chunk,
    is_of_pairs,
    widen_chunk,
)
from kernels.cpu.runtime.bf16_dot import BF16_DOT_TAGS
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.instruction_set import Instructions
from kernels.cpu.runtime.kernel_arguments import NEXT_THREAD
from kernels.cpu.runtime.memory import claim_task, claim_thread, field, item_bytes
from kernels.cpu.runtime.simd import float32_tag

narrow_registers = np.int8(0)
wide_registers = np.int16(0)
prepared_stride = njit(fields.widened_stride)


def is_quantized(weight_tag):
    """Whether a tag's type stands for quantized weights; quantized_kernel has their functions."""
    return isinstance(weight_tag, types.BaseTuple)


@njit
def linear_tasks(args, weight_tag, operand_tag, tag, registers):
    """Compute all groups of outputs.

    ``tag`` is the type of inputs and outputs, ``weight_tag`` of packed weights, ``operand_tag`` of
    their products; ``registers`` that of the machine's vector registers.
    """
    num_rows = field(args, fields.NUM_ROWS)
    chunk_rows = field(args, fields.CHUNK_ROWS)
    in_features = field(args, fields.IN_FEATURES)
    num_groups = field(args, fields.NUM_GROUPS)
    num_chunks = (num_rows + chunk_rows - 1) // chunk_rows
    thread = claim_thread(args)
    tile = field(args, fields.SCRATCH) + thread * field(args, fields.SCRATCH_BYTES)
    widened = tile + (chunk_rows + fields.MOST_BLOCK_ROWS) * fields.TILE_ROW
    widened_chunk = -1
    while True:
        task = claim_task(args)
        if task >= num_groups * num_chunks:
            return
        chunk, group = divmod(task, num_groups)
        first = chunk * chunk_rows
        rows = min(chunk_rows, num_rows - first)
        x_stride = field(args, fields.INPUT_ROW)
        x = field(args, fields.INPUT) + first * x_stride
        if prepares_rows(weight_tag, operand_tag, tag):
            if widened_chunk != chunk:
                prepare_rows(
                    args, weight_tag, operand_tag, tag, x, x_stride, widened, rows, in_features
                )
                widened_chunk = chunk
            x, x_stride = widened, prepared_stride(in_features)
        sum_group(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile)
        finish(args, tag, tile, first, rows, group)


def prepares_rows(weight_tag, operand_tag, tag):
    """Whether rows are prepared before they are multiplied. Never called, see sum_group."""
    raise NotImplementedError


@overload(prepares_rows)
def _choose_whether(weight_tag, operand_tag, tag):
    if is_quantized(weight_tag):
        return None
    prepares = tag != operand_tag and operand_tag == types.float32

    def chosen(weight_tag, operand_tag, tag):
        return prepares

    return chosen


def prepare_rows(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
    """Write rows to ``target`` as they are multiplied. Never called, see sum_group."""
    raise NotImplementedError


@overload(prepare_rows)
def _choose_preparation(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
    if is_quantized(weight_tag):
        return None

    def widen(args, weight_tag, operand_tag, tag, x, x_stride, target, rows, in_features):
        widen_rows(tag, x, x_stride, target, rows, in_features)

    return widen


def sum_group(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
    """tile [rows, GROUP_OUTPUTS] = x @ w of a group of outputs, over all inputs.

    Never called: numba puts the function below in its place, or that of other weights.
    """
    raise NotImplementedError


@overload(sum_group)
def _choose_sum_group(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
    if is_quantized(weight_tag):
        return None

    def chosen(args, weight_tag, operand_tag, registers, group, rows, x, x_stride, tile):
        in_features = field(args, fields.IN_FEATURES)
        weight_bytes = item_bytes(weight_tag) * fields.PANEL
        panel_stride = in_features * weight_bytes
        w = field(args, fields.WEIGHT) + group * fields.GROUP * panel_stride
        done = 0
        if is_of_pairs(operand_tag):
            done = rows_by_library(args, rows)
        if done != 0:
            multiply_by_library(args, done, x, x_stride, w, panel_stride, tile)
            x += done * x_stride
        sums, left = tile + done * fields.TILE_ROW, rows - done
        clear(sums, left)
        begin = 0 if left != 0 else in_features
        while begin < in_features:
            depth = in_features if left <= fields.MOST_BLOCK_ROWS else fields.DEPTH
            depth = min(depth, in_features - begin)
            x_at = x + begin * item_bytes(operand_tag)
            w_at = w + begin * weight_bytes
            begin += depth
            then = w + begin * weight_bytes
            if begin >= in_features:
                then = w + groups_until_next(args, group) * fields.GROUP * panel_stride
            multiply(
                registers, weight_tag, operand_tag, left, x_at, x_stride, w_at, panel_stride,
                depth // 2, then, sums,
            )  # fmt: skip

    return chosen


@njit
def groups_until_next(args, group):
    """How far the group is that this thread will probably claim next, behind those of others."""
    return min(field(args, NEXT_THREAD), field(args, fields.NUM_GROUPS) - group)


def multiply(
    registers, weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile
):
    """tile [rows, GROUP_OUTPUTS] += x @ w over ``pairs`` pairs of inputs.

    Weights at ``then`` are probably read next, and prefetched. Never called: numba puts one of the
    functions below in its place.
    """
    raise NotImplementedError


@overload(multiply)
def _choose_multiply(
    registers, weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile
):
    multiply = _multiply_wide if registers == types.int16 else _multiply_narrow

    def chosen(
        registers, weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile
    ):
        multiply(weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile)

    return chosen


@njit
def _multiply_narrow(
    weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile
):
    """tile [rows, GROUP_OUTPUTS] += x @ w in blocks for 16 registers of 8 lanes."""
    row = fields.TILE_ROW
    if rows == 1:
        accumulate(
            weight_tag, operand_tag, 1, 4, 0, x, x_stride, w, panel_stride, pairs, ITS_OWN, NOTHING,
            tile, row,
        )  # fmt: skip
        return
    if rows == 2:
        for panel in range(0, fields.GROUP, 2):
            w_at, out = w + panel * panel_stride, tile + 4 * panel * fields.PANEL
            accumulate(
                weight_tag, operand_tag, 2, 2, 1, x, x_stride, w_at, panel_stride, pairs,
                ITS_OWN, NOTHING, out, row,
            )  # fmt: skip
        return
    for panel in range(fields.GROUP):
        w_at, out = w + panel * panel_stride, tile + 4 * panel * fields.PANEL
        r = 0
        while r < rows:
            at, o, last = x + r * x_stride, out + r * row, rows - r - 1
            if last >= 4:
                accumulate(
                    weight_tag, operand_tag, 6, 1, last, at, x_stride, w_at, panel_stride, pairs,
                    NOTHING, NOTHING, o, row,
                )  # fmt: skip
                r += 6
            else:
                accumulate(
                    weight_tag, operand_tag, 4, 1, last, at, x_stride, w_at, panel_stride, pairs,
                    NOTHING, NOTHING, o, row,
                )  # fmt: skip
                r += 4


@njit
def _multiply_wide(weight_tag, operand_tag, rows, x, x_stride, w, panel_stride, pairs, then, tile):
    """tile [rows, GROUP_OUTPUTS] += x @ w in blocks for 32 registers of 16 lanes."""
    row = fields.TILE_ROW
    if rows == 1:
        accumulate(
            weight_tag, operand_tag, 1, 4, 0, x, x_stride, w, panel_stride, pairs, ITS_OWN, NOTHING,
            tile, row,
        )  # fmt: skip
        return
    if rows <= 4:
        accumulate(
            weight_tag, operand_tag, 4, 4, rows - 1, x, x_stride, w, panel_stride, pairs,
            ITS_OWN, NOTHING, tile, row,
        )  # fmt: skip
        return
    for panel in range(0, fields.GROUP, 2):
        w_at, out = w + panel * panel_stride, tile + 4 * panel * fields.PANEL
        # Later blocks of rows read weights from the caches, and memory would be idle. So the first
        # two blocks prefetch one of the next two panels each; a block that is alone prefetches
        # both. Other blocks prefetch weights that are in the caches already.
        ahead = then if panel + 2 == fields.GROUP else w_at + 2 * panel_stride
        also_ahead = ahead + panel_stride if rows <= fields.MOST_BLOCK_ROWS else w_at
        r = 0
        while r < rows:
            at, o, left = x + r * x_stride, out + r * row, rows - r
            if left > 16 or 8 < left <= 12:  # thirteen to sixteen rows are two blocks of eight
                accumulate(
                    weight_tag, operand_tag, 12, 2, left - 1, at, x_stride, w_at, panel_stride,
                    pairs, ahead, also_ahead, o, row,
                )  # fmt: skip
                r += 12
            else:
                accumulate(
                    weight_tag, operand_tag, 8, 2, left - 1, at, x_stride, w_at, panel_stride,
                    pairs, ahead, also_ahead, o, row,
                )  # fmt: skip
                r += 8
            ahead = ahead + panel_stride if r <= fields.MOST_BLOCK_ROWS else w_at


@njit
def clear(tile, rows):
    """Zero sums, also those of rows that a register block may have beyond the last one."""
    for r in range(rows if rows == 1 else rows + fields.MOST_BLOCK_ROWS):
        for panel in range(fields.GROUP):
            clear_chunk(tile + r * fields.TILE_ROW + 4 * panel * fields.PANEL)


@njit
def widen_rows(tag, x, x_stride, target, rows, in_features):
    """Write rows to ``target`` in float32."""
    stride = prepared_stride(in_features)
    for r in range(rows):
        for k in range(0, in_features, 16):
            source = x + r * x_stride + k * item_bytes(tag)
            widen_chunk(tag, source, target + r * stride + 4 * k)


@cache
def linear_kernel(weight: torch.dtype, dtype: torch.dtype, instructions: Instructions) -> Kernel:
    """Linear layers with packed weights of one type, inputs and outputs of another.

    Raises:
        ValueError: no kernel serves the types.
    """
    weight_tag, tag = element_tag(weight), element_tag(dtype)
    if (weight, dtype) == (torch.float32, torch.bfloat16):
        raise ValueError(f"no CPU kernel for weights of {weight} and inputs of {dtype}")
    operand_tag: Any = float32_tag
    if dtype == torch.bfloat16:
        operand_tag = BF16_DOT_TAGS.get(instructions.dot, float32_tag)
        if instructions.dot.by_amx:
            return compile_kernel(amx_linear_tasks, fields.AMX_LINEAR_LAYOUT, operand_tag, tag)
    registers = wide_registers if instructions.wide else narrow_registers
    return compile_kernel(
        linear_tasks, fields.LINEAR_LAYOUT, weight_tag, operand_tag, tag, registers
    )
