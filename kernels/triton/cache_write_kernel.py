"""The Triton kernel that stores new keys and values in their slots."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
LEVELS = tl.constexpr(127.0)  # of int8, on either side of zero


@triton.jit
def saturate(x):
    """x within what an 8-bit float can hold."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def scale_rows(x):
    """Scales [T'] of rows [T', D']: NaN for a row that is not finite."""
    largest = tl.max(tl.where(x < 0.0, 0.0 - x, x), 1)
    return largest / LEVELS + tl.sum(x * 0.0, 1)


@triton.jit
def round_rows(x, scales):
    """The nearest multiples [T', D'] of the rows' scales [T'], as int8."""
    inverse = 1.0 / tl.where(scales > 0.0, scales, 1.0)
    return tl.floor(x * inverse[:, None] + 0.5).to(tl.int8)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    key_cache,  # [num_blocks, Hkv, block_size, D]
    value_cache,  # [num_blocks, Hkv, block_size, D]
    key_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    value_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    slot_mapping,  # [T] int64
    num_tokens,
    key_inverse_scale,
    value_inverse_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_cache_head_stride,
    key_slot_stride,
    value_block_stride,
    value_cache_head_stride,
    value_slot_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    key_scale_slot_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    value_scale_slot_stride,
    HEAD_DIM: tl.constexpr,  # D
    PADDED_DIM: tl.constexpr,  # D rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    QUANTIZE: tl.constexpr,  # divide by the scales of the pool and saturate
    HAS_SCALES: tl.constexpr,  # store int8, and a scale for each token
):
    """One tile of tokens under one KV head; a negative slot is padding. Grid: (tiles of T, Hkv)."""
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)).to(tl.int64)  # [T']
    dim = tl.arange(0, PADDED_DIM)  # [D']
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)  # [T'] int64
    stored = (slot >= 0)[:, None] & (dim < HEAD_DIM)[None, :]  # [T', D']
    block = slot // BLOCK_SIZE  # [T'] int64
    offset = slot % BLOCK_SIZE  # [T'] int64

    key_from = token * key_token_stride + head * key_head_stride  # [T']
    key_to = block * key_block_stride + head * key_cache_head_stride + offset * key_slot_stride
    keys = tl.load(key + key_from[:, None] + dim[None, :], mask=stored, other=0.0)  # [T', D']
    if HAS_SCALES:
        scales = scale_rows(keys.to(tl.float32))  # [T']
        keys = round_rows(keys.to(tl.float32), scales)
        scale_to = block * key_scale_block_stride + head * key_scale_head_stride
        tl.store(key_scales + scale_to + offset * key_scale_slot_stride, scales, mask=slot >= 0)
    if QUANTIZE:
        keys = saturate(keys.to(tl.float32) * key_inverse_scale).to(key_cache.dtype.element_ty)
    tl.store(key_cache + key_to[:, None] + dim[None, :], keys, mask=stored)

    value_from = token * value_token_stride + head * value_head_stride  # [T']
    value_to = (
        block * value_block_stride + head * value_cache_head_stride + offset * value_slot_stride
    )  # [T']
    values = tl.load(value + value_from[:, None] + dim[None, :], mask=stored, other=0.0)
    if HAS_SCALES:
        scales = scale_rows(values.to(tl.float32))  # [T']
        values = round_rows(values.to(tl.float32), scales)
        scale_to = block * value_scale_block_stride + head * value_scale_head_stride
        tl.store(value_scales + scale_to + offset * value_scale_slot_stride, scales, mask=slot >= 0)
    if QUANTIZE:
        values = saturate(values.to(tl.float32) * value_inverse_scale)
        values = values.to(value_cache.dtype.element_ty)
    tl.store(value_cache + value_to[:, None] + dim[None, :], values, mask=stored)
