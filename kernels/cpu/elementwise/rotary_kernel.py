"""The CPU kernel of rotary position embeddings (Su et al., 2021), for queries and keys at once."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.memory import (
    claim,
    copy_bytes,
    field,
    item_bytes,
    load_element,
    store_element,
)


@njit
def rotate_tasks(job, tag):
    """Claim tokens until none is left: x * cos + (-right, left) * sin.

    Left and right are the halves of a head's first Dr elements, all of them for most models, and
    cosines and sines [Dr] those of the token.
    """
    num_tokens = field(job, fields.ROTARY_TOKENS)
    num_heads = field(job, fields.NUM_HEADS)
    num_kv_heads = field(job, fields.NUM_KV_HEADS)
    head_bytes = field(job, fields.HEAD_DIM) * item_bytes(tag)
    rotary_bytes = field(job, fields.ROTARY_DIM) * item_bytes(tag)
    while True:
        begin = claim(job + 8 * fields.NEXT_TASK) * fields.ROTARY_TASK_TOKENS
        if begin >= num_tokens:
            return
        for token in range(begin, min(begin + fields.ROTARY_TASK_TOKENS, num_tokens)):
            cos = field(job, fields.COS) + token * field(job, fields.COS_TOKEN)
            sin = field(job, fields.SIN) + token * field(job, fields.SIN_TOKEN)
            x = field(job, fields.QUERY) + token * field(job, fields.QUERY_TOKEN)
            out = field(job, fields.QUERY_OUT) + token * num_heads * head_bytes
            for _ in range(num_heads):
                _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes)
                x += field(job, fields.QUERY_HEAD)
                out += head_bytes
            x = field(job, fields.KEY) + token * field(job, fields.KEY_TOKEN)
            out = field(job, fields.KEY_OUT) + token * num_kv_heads * head_bytes
            for _ in range(num_kv_heads):
                _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes)
                x += field(job, fields.KEY_HEAD)
                out += head_bytes


@njit
def _rotate_head(tag, x, cos, sin, out, rotary_bytes, head_bytes):
    half = rotary_bytes // 2
    at = 0
    while at + fields.PANEL * item_bytes(tag) <= half:
        _rotate_chunk(tag, x + at, cos + at, sin + at, out + at, half)
        at += fields.PANEL * item_bytes(tag)
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
    """Sixteen elements of the left half and those opposite, ``half`` bytes on.

    Products are rounded before they are added, as torch does it.
    """

    def codegen(context, builder, signature, args):
        _, x, cos, sin, out, half = args
        tag = signature.args[0]

        def pair(address):
            opposite = builder.add(address, half)
            return [simd.load_vector(builder, at, tag) for at in (address, opposite)]

        (left, right), (left_cos, right_cos), (left_sin, right_sin) = map(pair, (x, cos, sin))
        turned = builder.fsub(builder.fmul(left, left_cos), builder.fmul(right, left_sin))
        simd.store_vector(builder, turned, out, tag)
        turned = builder.fadd(builder.fmul(right, right_cos), builder.fmul(left, right_sin))
        simd.store_vector(builder, turned, builder.add(out, half), tag)

    i64 = types.int64
    return types.void(tag, i64, i64, i64, i64, i64), codegen
