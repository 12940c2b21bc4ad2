"""The CPU kernel of rotary position embeddings (Su et al., 2021), for queries and keys at once."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from functools import cache

import torch
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import (
    claim_task,
    copy_bytes,
    field,
    item_bytes,
    load_element,
    store_element,
)
from kernels.cpu.runtime.simd import LANES


@njit
def rotate_tasks(args, tag):
    """x * cos + (-right, left) * sin for all tokens.

    Left and right are the halves of a head's first Dr elements, of all its elements in most models.
    Cosines and sines [Dr] are the token's.
    """
    num_tokens = field(args, fields.ROTARY_TOKENS)
    num_heads = field(args, fields.NUM_HEADS)
    num_kv_heads = field(args, fields.NUM_KV_HEADS)
    head_bytes = field(args, fields.HEAD_DIM) * item_bytes(tag)
    rotary_bytes = field(args, fields.ROTARY_DIM) * item_bytes(tag)
    while True:
        begin = claim_task(args) * fields.ROTARY_TASK_TOKENS
        if begin >= num_tokens:
            return
        for token in range(begin, min(begin + fields.ROTARY_TASK_TOKENS, num_tokens)):
            cos = field(args, fields.COS) + token * field(args, fields.COS_TOKEN)
            sin = field(args, fields.SIN) + token * field(args, fields.SIN_TOKEN)
            x = field(args, fields.QUERY) + token * field(args, fields.QUERY_TOKEN)
            out = field(args, fields.QUERY_OUT) + token * num_heads * head_bytes
            for _ in range(num_heads):
                _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes)
                x += field(args, fields.QUERY_HEAD)
                out += head_bytes
            x = field(args, fields.KEY) + token * field(args, fields.KEY_TOKEN)
            out = field(args, fields.KEY_OUT) + token * num_kv_heads * head_bytes
            for _ in range(num_kv_heads):
                _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes)
                x += field(args, fields.KEY_HEAD)
                out += head_bytes


@njit
def _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes):
    half = rotary_bytes // 2
    at = 0
    while at + LANES * item_bytes(tag) <= half:
        _rotate_chunk(tag, x + at, cos + at, sin + at, out + at, half)
        at += LANES * item_bytes(tag)
    while at < half:
        left, right = load_element(tag, x + at), load_element(tag, x + half + at)
        rotated = left * load_element(tag, cos + at) - right * load_element(tag, sin + at)
        store_element(tag, out + at, rotated)
        rotated = right * load_element(tag, cos + half + at)
        rotated += left * load_element(tag, sin + half + at)
        store_element(tag, out + half + at, rotated)
        at += item_bytes(tag)
    if rotary_bytes < head_bytes:
        copy_bytes(out + rotary_bytes, x + rotary_bytes, head_bytes - rotary_bytes)


@intrinsic
def _rotate_chunk(typingctx, tag, x, cos, sin, out, half):
    """Rotate sixteen elements of the left half with those of the right half, ``half`` bytes on.

    Products are rounded before they are added, as in torch.
    """

    def codegen(context, builder, signature, args):
        _, x, cos, sin, out, half = args
        tag = signature.args[0]

        def pair(address):
            opposite = builder.add(address, half)
            return [simd.load_vector(builder, at, tag) for at in (address, opposite)]

        (left, right), (left_cos, right_cos), (left_sin, right_sin) = map(pair, (x, cos, sin))
        rotated = builder.fsub(builder.fmul(left, left_cos), builder.fmul(right, left_sin))
        simd.store_vector(builder, rotated, out, tag)
        rotated = builder.fadd(builder.fmul(right, right_cos), builder.fmul(left, right_sin))
        simd.store_vector(builder, rotated, builder.add(out, half), tag)

    i64 = types.int64
    return types.void(tag, i64, i64, i64, i64, i64), codegen


@cache
def rotary_kernel(dtype: torch.dtype) -> Kernel:
    """Rotary embeddings of elements of a type.

    Raises:
        ValueError: no kernel serves the type.
    """
    return compile_kernel(rotate_tasks, fields.ROTARY_LAYOUT, element_tag(dtype))
