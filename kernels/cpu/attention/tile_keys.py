"""Addresses of a tile's keys, values and rows, and the mask of scores, in CPU attention."""

import math

from numba import njit

from kernels.cpu.attention import attention_arguments as fields
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
def score_scale(args):
    """The factor of query . key, by which weights become powers of two."""
    scale = load_element(float32_tag, args + 8 * fields.SCALE)
    if load_element(float32_tag, args + 8 * fields.SOFTCAP) == 0:
        scale *= LOG2_E
    return scale


@njit
def locate_keys(args, sequence, head, begin, end, keys, values):
    """Fill the tables ``keys`` and ``values`` with the addresses of slots [begin, end)."""
    block_size = field(args, fields.BLOCK_SIZE)
    table = field(args, fields.TABLES) + sequence * field(args, fields.TABLE_ROW)
    key_slot = field(args, fields.KEY_SLOT)
    value_slot = field(args, fields.VALUE_SLOT)
    key_head = field(args, fields.KEY) + head * field(args, fields.KEY_HEAD)
    value_head = field(args, fields.VALUE) + head * field(args, fields.VALUE_HEAD)
    key_block = field(args, fields.KEY_BLOCK)
    value_block = field(args, fields.VALUE_BLOCK)
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
def locate_tile(args, sequence, head, begin, end, multiple, keys, values):
    """The same for whole vectors of slots, from a ``multiple`` of sixteen or more on.

    Entries outside [begin, end) repeat the first slot and the last one.
    """
    before = begin % multiple
    count = before + end - begin
    locate_keys(args, sequence, head, begin, end, keys + 8 * before, values + 8 * before)
    for table in (keys, values):
        for n in range(before):
            store_i64(table + 8 * n, load_i64(table + 8 * before))
        for n in range(count, (count + 15) // 16 * 16):
            store_i64(table + 8 * n, load_i64(table + 8 * (count - 1)))


@njit
def hide_keys(scores, stride, count, begin, rows, group, position, window):
    """Set the scores of later keys, and of keys before a row's window, to minus infinity."""
    for r in range(rows):
        seen = position + r // group
        for n in range(max(0, seen + 1 - begin), count):
            store_element(float32_tag, scores + n * stride + 4 * r, -math.inf)
        for n in range(min(count, seen - window + 1 - begin)):
            store_element(float32_tag, scores + n * stride + 4 * r, -math.inf)


@njit
def row_address(base, token_bytes, head_bytes, group, row):
    """The address of a row of a tile."""
    token, member = divmod(row, group)
    return base + token * token_bytes + member * head_bytes
