"""The Triton kernel that copies whole blocks inside the pool."""

import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    key_cache,  # [num_blocks, Hkv, block_size, D]
    value_cache,  # [num_blocks, Hkv, block_size, D]
    sources,  # [P] int64
    targets,  # [P] int64
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    HEAD_DIM: tl.constexpr,  # D
    PADDED_DIM: tl.constexpr,  # D rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
):
    """One tile of a block's slots under one KV head. Grid: (P, Hkv, tiles of the block)."""
    pair = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offset = (tl.program_id(2) * TILE_SLOTS + tl.arange(0, TILE_SLOTS)).to(tl.int64)  # [N]
    dim = tl.arange(0, PADDED_DIM)  # [D']
    source = tl.load(sources + pair).to(tl.int64)
    target = tl.load(targets + pair).to(tl.int64)
    copied = (offset < BLOCK_SIZE)[:, None] & (dim < HEAD_DIM)[None, :]  # [N, D']

    key_within = (head * key_head_stride + offset * key_slot_stride)[:, None] + dim[None, :]
    keys = tl.load(key_cache + source * key_block_stride + key_within, mask=copied)  # [N, D']
    tl.store(key_cache + target * key_block_stride + key_within, keys, mask=copied)

    value_within = (head * value_head_stride + offset * value_slot_stride)[:, None] + dim[None, :]
    values = tl.load(value_cache + source * value_block_stride + value_within, mask=copied)
    tl.store(value_cache + target * value_block_stride + value_within, values, mask=copied)
