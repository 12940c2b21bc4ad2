"""Rows and keys of a tile in CPU attention: where they lie, and who does not see whom."""

import math

from numba import njit

from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import (
    field,
    load_element,
    load_i32,
    load_i64,
    store_element,
    store_i64,
)
from kernels.cpu.runtime.simd import float32_tag

LOG2_E = math.log2(math.e)


@njit
def score_scale(job):
    """By what products of queries and keys are multiplied, so that weights are powers of two."""
    scale = load_element(float32_tag, job + 8 * fields.SCALE)
    if load_element(float32_tag, job + 8 * fields.SOFTCAP) == 0:
        scale *= LOG2_E
    return scale


@njit
def locate_keys(job, sequence, head, begin, end, keys, values):
    """Fill the tables ``keys`` and ``values`` with the addresses of slots [begin, end)."""
    block_size = field(job, fields.BLOCK_SIZE)
    table = field(job, fields.TABLES) + sequence * field(job, fields.TABLE_ROW)
    key_slot = field(job, fields.KEY_SLOT)
    value_slot = field(job, fields.VALUE_SLOT)
    key_head = field(job, fields.KEY) + head * field(job, fields.KEY_HEAD)
    value_head = field(job, fields.VALUE) + head * field(job, fields.VALUE_HEAD)
    key_block = field(job, fields.KEY_BLOCK)
    value_block = field(job, fields.VALUE_BLOCK)
    position = begin
    while position < end:
        logical, offset = divmod(position, block_size)
        block = load_i32(table + 4 * logical)
        stop = min(end, (logical + 1) * block_size)
        key = key_head + block * key_block + offset * key_slot
        value = value_head + block * value_block + offset * value_slot
        for n in range(position - begin, stop - begin):
            store_i64(keys + 8 * n, key)
            store_i64(values + 8 * n, value)
            key += key_slot
            value += value_slot
        position = stop


@njit
def locate_tile(job, sequence, head, begin, end, keys, values):
    """The same for whole vectors of slots, from a multiple of 16 on.

    What is there beyond repeats the first slot and the last one.
    """
    before = begin % 16
    count = before + end - begin
    locate_keys(job, sequence, head, begin, end, keys + 8 * before, values + 8 * before)
    for table in (keys, values):
        for n in range(before):
            store_i64(table + 8 * n, load_i64(table + 8 * before))
        for n in range(count, (count + 15) // 16 * 16):
            store_i64(table + 8 * n, load_i64(table + 8 * (count - 1)))


@njit
def hide_keys(scores, stride, count, begin, rows, group, position, window):
    """Minus infinity where a row does not see a key: later ones, and those before its window."""
    for r in range(rows):
        seen = position + r // group
        for n in range(max(0, seen + 1 - begin), count):
            store_element(float32_tag, scores + n * stride + 4 * r, -math.inf)
        for n in range(min(count, seen - window + 1 - begin)):
            store_element(float32_tag, scores + n * stride + 4 * r, -math.inf)


@njit
def row_address(base, token_bytes, head_bytes, group, row):
    """Where a row of a tile lies."""
    token, member = divmod(row, group)
    return base + token * token_bytes + member * head_bytes
