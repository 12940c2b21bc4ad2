"""The CPU kernel that writes new keys and values to their slots of the KV cache."""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

from functools import cache
from typing import Any

import torch
from numba import njit, types
from numba.extending import overload

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.kv_types_ir import convert_row, quantize_row
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import claim_task, copy_bytes, field, load_i64
from kernels.cpu.runtime.simd import int8_tag


@njit
def write_tasks(args, tag, kv):
    """Store keys and values of WRITE_TOKENS tokens per task.

    Elements of the type ``tag`` become those of the type ``kv``; of one type they are copied.
    """
    num_tokens = field(args, fields.NUM_TOKENS)
    num_kv_heads = field(args, fields.NUM_KV_HEADS)
    block_size = field(args, fields.BLOCK_SIZE)
    slots = field(args, fields.SLOTS)  # [T] int64
    while True:
        begin = claim_task(args) * fields.WRITE_TOKENS
        if begin >= num_tokens:
            return
        for token in range(begin, min(begin + fields.WRITE_TOKENS, num_tokens)):
            slot = load_i64(slots + 8 * token)
            if slot < 0:  # padding
                continue
            block, offset = slot // block_size, slot % block_size
            key = field(args, fields.KEY) + block * field(args, fields.KEY_BLOCK)
            key += offset * field(args, fields.KEY_SLOT)
            value = field(args, fields.VALUE) + block * field(args, fields.VALUE_BLOCK)
            value += offset * field(args, fields.VALUE_SLOT)
            key_scale = field(args, fields.KEY_SCALE) + block * field(args, fields.KEY_SCALE_BLOCK)
            key_scale += offset * field(args, fields.KEY_SCALE_SLOT)
            value_scale = field(args, fields.VALUE_SCALE)
            value_scale += block * field(args, fields.VALUE_SCALE_BLOCK)
            value_scale += offset * field(args, fields.VALUE_SCALE_SLOT)
            new_key = field(args, fields.NEW_KEY) + token * field(args, fields.NEW_KEY_TOKEN)
            new_value = field(args, fields.NEW_VALUE)
            new_value += token * field(args, fields.NEW_VALUE_TOKEN)
            for head in range(num_kv_heads):
                _store_row(
                    args,
                    tag,
                    kv,
                    new_key + head * field(args, fields.NEW_KEY_HEAD),
                    key + head * field(args, fields.KEY_HEAD),
                    key_scale + head * field(args, fields.KEY_SCALE_HEAD),
                )
                _store_row(
                    args,
                    tag,
                    kv,
                    new_value + head * field(args, fields.NEW_VALUE_HEAD),
                    value + head * field(args, fields.VALUE_HEAD),
                    value_scale + head * field(args, fields.VALUE_SCALE_HEAD),
                )


def _copy_row(args, tag, kv, source, target, scale_at):
    copy_bytes(target, source, field(args, fields.ROW_BYTES))


def _narrow_row(args, tag, kv, source, target, scale_at):
    convert_row(tag, kv, source, field(args, fields.HEAD_DIM) // 16, target)


def _quantize_row(args, tag, kv, source, target, scale_at):
    quantize_row(tag, source, field(args, fields.HEAD_DIM) // 16, target, scale_at)


def _store_row(args, tag, kv, source, target, scale_at):
    """Store one key or value. Never called: numba puts one of three functions in its place."""
    raise NotImplementedError


@overload(_store_row)
def _choose_store(args, tag, kv, source, target, scale_at):
    if tag == kv:
        return _copy_row
    return _quantize_row if kv == types.int8 else _narrow_row


@cache
def write_kernel(dtype: torch.dtype, kv_dtype: torch.dtype) -> Kernel:
    """The cache write of keys and values of one type into a cache of another, or of the same.

    Raises:
        ValueError: no kernel serves the types.
    """
    if dtype == kv_dtype:  # rows are copied as bytes, whatever their type
        return _compiled(int8_tag, int8_tag)
    return _compiled(element_tag(dtype), element_tag(kv_dtype))


def _compiled(tag: Any, kv: Any) -> Kernel:
    return compile_kernel(write_tasks, fields.CACHE_WRITE_LAYOUT, tag, kv)
