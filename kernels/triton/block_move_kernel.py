"""The Triton kernel that moves whole blocks of many layers in one launch."""

import triton
import triton.language as tl


@triton.jit
def move_blocks_kernel(  # type: ignore[no-untyped-def]
    addresses,  # [A] int64, of the keys and the values of each layer
    sources,  # [P] int64, blocks of the pool, or rows of the packed blocks
    targets,  # [P] int64
    packed,  # [n, PACKED_WORDS]
    shares,  # [A] int64, where each tensor's share of a packed block begins, in words
    WORD: tl.constexpr,  # integer type: blocks are moved as words, whatever they hold
    ALIGNED: tl.constexpr,  # everything is a multiple of 16 bytes
    FROM_PACKED: tl.constexpr,
    TO_PACKED: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # Hkv * block_size
    BLOCK_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,  # words of D elements
    PADDED_WORDS: tl.constexpr,
    PACKED_WORDS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # in words, as all strides here
    HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # R'
):
    """Some rows of one tensor of one block. Grid: (P, A, tiles of a block's rows)."""
    pair = tl.program_id(0)
    tensor = tl.program_id(1)
    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # [R']
    word = tl.arange(0, PADDED_WORDS)  # [W']
    moved = (row < NUM_ROWS)[:, None] & (word < ROW_WORDS)[None, :]  # [R', W']
    source = tl.load(sources + pair).to(tl.int64)
    target = tl.load(targets + pair).to(tl.int64)

    pool = tl.load(addresses + tensor).to(tl.pointer_type(WORD))
    share = packed + tl.load(shares + tensor)
    if ALIGNED:
        pool = tl.multiple_of(pool, 16)
        share = tl.multiple_of(share, 16)
    head = row // BLOCK_SIZE  # [R']
    slot = row % BLOCK_SIZE  # [R']
    in_pool = (head.to(tl.int64) * HEAD_STRIDE + slot * SLOT_STRIDE)[:, None] + word[None, :]
    in_packed = (row * ROW_WORDS)[:, None] + word[None, :]  # [R', W']
    if FROM_PACKED:
        words = tl.load(share + source * PACKED_WORDS + in_packed, mask=moved)  # [R', W']
    else:
        words = tl.load(pool + source * BLOCK_STRIDE + in_pool, mask=moved)  # [R', W']
    if TO_PACKED:
        tl.store(share + target * PACKED_WORDS + in_packed, words, mask=moved)
    else:
        tl.store(pool + target * BLOCK_STRIDE + in_pool, words, mask=moved)
