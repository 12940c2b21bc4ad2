"""The Triton kernel of rotary position embeddings, for queries and keys at once."""

import triton
import triton.language as tl


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
    has_dim = dim < HALF  # [D' / 2]
    there = (head < NUM_HEADS)[:, None] & has_dim[None, :]  # [H', D' / 2]
    source = x + token * token_stride + head[:, None] * head_stride + dim[None, :]
    left = tl.load(source, mask=there, other=0.0).to(tl.float32)  # [H', D' / 2]
    right = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    left_cos = tl.load(cos_token + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    right_cos = tl.load(cos_token + HALF + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    left_sin = tl.load(sin_token + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    right_sin = tl.load(sin_token + HALF + dim, mask=has_dim, other=0.0).to(tl.float32)[None, :]
    target = out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    rotated = left * left_cos - right * left_sin
    tl.store(target, rotated.to(out.dtype.element_ty), mask=there)
    rotated = right * right_cos + left * right_sin
    tl.store(target + HALF, rotated.to(out.dtype.element_ty), mask=there)


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
