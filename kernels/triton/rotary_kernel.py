"""The Triton kernels of rotary position embeddings, for queries and keys at once."""

import triton
import triton.language as tl

from kernels.triton.cache_write_kernel import round_rows, saturate, scale_rows


@triton.jit
def _turned_heads(  # type: ignore[no-untyped-def]
    source,  # [H', D / 2] addresses of left halves
    there,  # [H', D' / 2]
    cos_token,  # [D]
    sin_token,  # [D]
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Both halves [H', D' / 2] of rotated heads, in float32."""
    dim = tl.arange(0, PADDED_HALF)  # [D' / 2]
    has_dim = dim < HALF  # [D' / 2]
    left = tl.load(source, mask=there, other=0.0).to(tl.float32)  # [H', D' / 2]
    right = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    left_cos = tl.load(cos_token + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    right_cos = tl.load(cos_token + HALF + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    left_sin = tl.load(sin_token + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    right_sin = tl.load(sin_token + HALF + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    return left * left_cos - right * left_sin, right * right_cos + left * right_sin


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x,  # [T, heads, D]
    out,  # [T, heads, D], contiguous
    token,
    first_head,
    cos_token,  # [D]
    sin_token,  # [D]
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    head = (first_head + tl.arange(0, TILE_HEADS)).to(tl.int64)  # [H']
    dim = tl.arange(0, PADDED_HALF)  # [D' / 2]
    there = (head < NUM_HEADS)[:, None] & (dim < HALF)[None, :]  # [H', D' / 2]
    source = x + token * token_stride + head[:, None] * head_stride + dim[None, :]
    left, right = _turned_heads(source, there, cos_token, sin_token, HALF, PADDED_HALF)
    target = out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(target, left.to(out.dtype.element_ty), mask=there)
    tl.store(target + HALF, right.to(out.dtype.element_ty), mask=there)


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    key,  # [T, Hkv, D]
    query_out,  # [T, H, D], contiguous
    key_out,  # [T, Hkv, D], contiguous
    cos,  # [T, D]
    sin,  # [T, D]
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_token_stride,
    sin_token_stride,
    NUM_HEADS: tl.constexpr,  # H
    NUM_KV_HEADS: tl.constexpr,  # Hkv
    HEAD_DIM: tl.constexpr,  # D, even
    PADDED_HALF: tl.constexpr,  # D / 2 rounded up to a power of two
    TILE_HEADS: tl.constexpr,
):
    """One token's queries or keys under a tile of heads: x * cos + (-right, left) * sin.

    Left and right are the halves of a head (RoFormer, in the order of GPT-NeoX), and cosines and
    sines are those of the token's position. Grid: (T, tiles of H and then of Hkv).
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_token = cos + token * cos_token_stride
    sin_token = sin + token * sin_token_stride
    query_tiles: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    if tile < query_tiles:
        _rotate_heads(
            query, query_out, token, tile * TILE_HEADS, cos_token, sin_token,
            query_token_stride, query_head_stride, NUM_HEADS, HEAD_DIM, PADDED_HALF, TILE_HEADS,
        )  # fmt: skip
    else:
        _rotate_heads(
            key, key_out, token, (tile - query_tiles) * TILE_HEADS, cos_token, sin_token,
            key_token_stride, key_head_stride, NUM_KV_HEADS, HEAD_DIM, PADDED_HALF, TILE_HEADS,
        )  # fmt: skip


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    left,  # [H', D' / 2]
    right,  # [H', D' / 2]
    target,  # [H', D' / 2] addresses of left halves in the pool
    scales,  # [H'] addresses of the heads' scales in the pool
    there,  # [H', D' / 2]
    has_head,  # [H']
    inverse_scale,
    HALF: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Store the heads of one token, as ``write_kv_kernel`` does."""
    if HAS_SCALES:
        left, right = left.to(tl.float32), right.to(tl.float32)
        of_left, of_right = scale_rows(left), scale_rows(right)  # [H'], [H']
        # A maximum drops NaN.
        each = tl.maximum(of_left, of_right) + of_left * 0.0 + of_right * 0.0  # [H']
        left, right = round_rows(left, each), round_rows(right, each)
        tl.store(scales, each, mask=has_head)
    if QUANTIZE:
        left = saturate(left.to(tl.float32) * inverse_scale)
        right = saturate(right.to(tl.float32) * inverse_scale)
    tl.store(target, left.to(target.dtype.element_ty), mask=there)
    tl.store(target + HALF, right.to(target.dtype.element_ty), mask=there)


@triton.jit
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    query_out,  # [T, H, D], contiguous
    cos,  # [T, D]
    sin,  # [T, D]
    key_cache,  # [num_blocks, Hkv, block_size, D]
    value_cache,  # [num_blocks, Hkv, block_size, D]
    key_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    value_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    slot_mapping,  # [T] int64
    key_inverse_scale,
    value_inverse_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_token_stride,
    sin_token_stride,
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
    NUM_HEADS: tl.constexpr,  # H
    NUM_KV_HEADS: tl.constexpr,  # Hkv
    HEAD_DIM: tl.constexpr,  # D, even
    PADDED_HALF: tl.constexpr,  # D / 2 rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUANTIZE: tl.constexpr,  # divide by the scales of the pool and saturate
    HAS_SCALES: tl.constexpr,  # store int8, and a scale for each token
):
    """One token under a tile of heads: queries are rotated, or keys are, and stored with values.

    ``rotate_kernel`` and ``write_kv_kernel`` in one, with the same bits: rotated keys are rounded
    to their own type before they are stored in another. A token with a negative slot is padding:
    its queries alone are rotated. Grid: (T, tiles of H and then of Hkv).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_token = cos + token * cos_token_stride
    sin_token = sin + token * sin_token_stride
    query_tiles: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    if tile < query_tiles:
        _rotate_heads(
            query, query_out, token, tile * TILE_HEADS, cos_token, sin_token,
            query_token_stride, query_head_stride, NUM_HEADS, HEAD_DIM, PADDED_HALF, TILE_HEADS,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        head = ((tile - query_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)  # [H']
        dim = tl.arange(0, PADDED_HALF)  # [D' / 2]
        has_head = (head < NUM_KV_HEADS) & (slot >= 0)  # [H']
        there = has_head[:, None] & (dim < HALF)[None, :]  # [H', D' / 2]
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

        source = key + token * key_token_stride + head[:, None] * key_head_stride + dim[None, :]
        left, right = _turned_heads(source, there, cos_token, sin_token, HALF, PADDED_HALF)
        target = key_cache + block * key_block_stride + offset * key_slot_stride
        scale_at = key_scales + block * key_scale_block_stride + offset * key_scale_slot_stride
        _store_heads(
            left.to(key.dtype.element_ty), right.to(key.dtype.element_ty),
            target + head[:, None] * key_cache_head_stride + dim[None, :],
            scale_at + head * key_scale_head_stride,
            there, has_head, key_inverse_scale, HALF, QUANTIZE, HAS_SCALES,
        )  # fmt: skip

        source = value + token * value_token_stride + head[:, None] * value_head_stride
        source += dim[None, :]
        left = tl.load(source, mask=there, other=0.0)  # [H', D' / 2]
        right = tl.load(source + HALF, mask=there, other=0.0)  # [H', D' / 2]
        target = value_cache + block * value_block_stride + offset * value_slot_stride
        scale_at = value_scales + block * value_scale_block_stride
        scale_at += offset * value_scale_slot_stride
        _store_heads(
            left, right,
            target + head[:, None] * value_cache_head_stride + dim[None, :],
            scale_at + head * value_scale_head_stride,
            there, has_head, value_inverse_scale, HALF, QUANTIZE, HAS_SCALES,
        )  # fmt: skip
