"""The Triton kernel that joins the pieces of a tile (FlashDecoding's second half)."""

import triton
import triton.language as tl

from kernels.triton.work_split import cut_work, find_item, first_partial, value_of


@triton.jit(do_not_specialize=["num_seqs", "capacity", "window"])
def merge_kernel(  # type: ignore[no-untyped-def]
    out,  # [T, H, D]
    partials,  # [partial, Hkv, M, D] float32
    partial_logs,  # [partial, Hkv, M] float32
    context_lens,  # [S] int32
    query_starts,  # [S + 1] int32
    num_seqs,
    capacity,
    window,
    out_token_stride,
    out_head_stride,
    SEQS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    SHORT: tl.constexpr,
    MIN_PIECE_TILES: tl.constexpr,
    FIXED_PIECE_TILES: tl.constexpr,
    MOST_FIXED_PIECES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MERGE_ROWS: tl.constexpr,  # R', rows of a tile that one program merges
    MERGE_PIECES: tl.constexpr,  # P', pieces that it loads at once
):
    """R' rows of one tile under one KV head. Grid: (Hkv, tiles with pieces, rows of a tile / R').

    Splits the work as the kernel that wrote the pieces does, and so finds the same ones.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0).to(tl.int64)
    tiles, pieces = cut_work(
        context_lens, query_starts, num_seqs, window, capacity,
        SEQS, TILE_TOKENS, TILE_KEYS, SHORT_TOKENS, SHORT, HAS_WINDOW, True, MIN_PIECE_TILES,
        FIXED_PIECE_TILES, MOST_FIXED_PIECES,
    )  # fmt: skip
    sequence, tile = find_item(tl.where(pieces > 1, tiles, 0), tl.program_id(1), SEQS)
    num_pieces = value_of(pieces, sequence, SEQS)
    if num_pieces == 0:  # there are fewer such tiles
        return
    first_row = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - first_row

    row = tl.program_id(2) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)  # [R']
    token = tile * TILE_TOKENS + row // GROUP  # [R']
    has_row = (token < num_rows) & (row < TILE_TOKENS * GROUP)  # [R']
    dim = tl.arange(0, PADDED_DIM)  # [D']
    has_dim = dim < HEAD_DIM  # [D']
    piece = tl.arange(0, MERGE_PIECES)  # [P']
    partial = first_partial(tiles, pieces, sequence, SEQS) + tile * num_pieces
    num_kv_heads = tl.num_programs(0)

    maximum = tl.full([MERGE_ROWS], float("-inf"), tl.float32)  # [R']
    total = tl.zeros([MERGE_ROWS], tl.float32)  # [R']
    sums = tl.zeros([MERGE_ROWS, PADDED_DIM], tl.float32)  # [R', D']
    for first in range(0, num_pieces, MERGE_PIECES):
        number = (partial + first + piece).to(tl.int64)  # [P']
        flat_row = ((number * num_kv_heads + kv_head) * TILE_ROWS)[:, None] + row[None, :]
        exists = (first + piece < num_pieces)[:, None] & has_row[None, :]  # [P', R']
        logs = tl.load(partial_logs + flat_row, mask=exists, other=float("-inf"))  # [P', R']
        # A piece in which a row has seen nothing left nothing to load either.
        seen = logs > float("-inf")  # [P', R']
        attended = tl.load(
            partials + flat_row[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=seen[:, :, None] & has_dim[None, None, :],
            other=0.0,
        )  # [P', R', D']
        peak = tl.maximum(maximum, tl.max(logs, 0))  # [R']
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # [R']
        weights = tl.exp2(logs - shift[None, :])  # [P', R']
        shrink = tl.exp2(maximum - shift)  # [R']
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * attended, 0)
        maximum = peak

    merged = sums / tl.where(has_row, total, 1.0)[:, None]  # [R', D']
    flat_token = (first_row + token).to(tl.int64)  # [R']
    head = kv_head * GROUP + row % GROUP  # [R']
    tl.store(
        out
        + flat_token[:, None] * out_token_stride
        + head[:, None] * out_head_stride
        + dim[None, :],
        merged.to(out.dtype.element_ty),
        mask=has_row[:, None] & has_dim[None, :],
    )
