"""Addresses of a tile's keys, values and rows, scales, and the mask of scores, in CPU attention."""

import math

from numba import njit

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.kv_types_ir import fetch_line
from kernels.cpu.runtime.memory import (
    field,
    load_element,
    load_i32,
    load_i64,
    store_element,
    store_i32,
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
def load_scales(args, sequence, head, begin, end, multiple, scales):
    """Fill ``scales`` [2, KV_TILE] with the scales of the keys and values of slots [begin, end).

    From a ``multiple`` on and up to one, as in ``locate_tile``; entries outside [begin, end) are 0.
    """
    block_size = field(args, fields.BLOCK_SIZE)
    table = field(args, fields.TABLES) + sequence * field(args, fields.TABLE_ROW)
    key_slot, value_slot = field(args, fields.KEY_SCALE_SLOT), field(args, fields.VALUE_SCALE_SLOT)
    key_head = field(args, fields.KEY_SCALE) + head * field(args, fields.KEY_SCALE_HEAD)
    value_head = field(args, fields.VALUE_SCALE) + head * field(args, fields.VALUE_SCALE_HEAD)
    base = begin - begin % multiple
    key_scales, value_scales = scales, scales + 4 * fields.KV_TILE
    for n in range(begin - base):
        store_element(float32_tag, key_scales + 4 * n, 0.0)
        store_element(float32_tag, value_scales + 4 * n, 0.0)
    position = begin
    while position < end:
        logical, offset = divmod(position, block_size)
        block = load_i32(table + 4 * logical)
        key = key_head + block * field(args, fields.KEY_SCALE_BLOCK) + offset * key_slot
        value = value_head + block * field(args, fields.VALUE_SCALE_BLOCK) + offset * value_slot
        stop = min(end, (logical + 1) * block_size)
        for n in range(position - base, stop - base):
            store_i32(key_scales + 4 * n, load_i32(key))
            store_i32(value_scales + 4 * n, load_i32(value))
            key += key_slot
            value += value_slot
        position = stop
    for n in range(end - base, (end - base + multiple - 1) // multiple * multiple):
        store_element(float32_tag, key_scales + 4 * n, 0.0)
        store_element(float32_tag, value_scales + 4 * n, 0.0)


@njit
def fetch_scales(args, sequence, head, begin, end):
    """Prefetch the scales of slots [begin, end), a cache line after the other if they are dense."""
    block_size = field(args, fields.BLOCK_SIZE)
    table = field(args, fields.TABLES) + sequence * field(args, fields.TABLE_ROW)
    key_slot, value_slot = field(args, fields.KEY_SCALE_SLOT), field(args, fields.VALUE_SCALE_SLOT)
    key_head = field(args, fields.KEY_SCALE) + head * field(args, fields.KEY_SCALE_HEAD)
    value_head = field(args, fields.VALUE_SCALE) + head * field(args, fields.VALUE_SCALE_HEAD)
    step = 16 if key_slot == 4 else 1
    position = begin
    while position < end:
        logical, offset = divmod(position, block_size)
        block = load_i32(table + 4 * logical)
        fetch_line(key_head + block * field(args, fields.KEY_SCALE_BLOCK) + offset * key_slot)
        fetch_line(value_head + block * field(args, fields.VALUE_SCALE_BLOCK) + offset * value_slot)
        position = min(position + step, (logical + 1) * block_size)


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
