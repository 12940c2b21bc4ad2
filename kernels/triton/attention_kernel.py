"""The Triton kernel of paged attention. Symbols are explained in ``kernels/README.md``."""

import triton
import triton.language as tl

from kernels.triton.work_split import cut_work, find_item, first_partial, value_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_block_ids(  # type: ignore[no-untyped-def]
    table,  # [max_blocks] int32
    start,
    first_key,
    end_key,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Block ids of the keys [start, start + TILE_KEYS): one per key, or one for all of them."""
    if BLOCK_SIZE >= TILE_KEYS:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end_key, other=0).to(tl.int64)
    else:  # noqa: RET505 - the branches differ in shape: only one may be compiled
        position = start + tl.arange(0, TILE_KEYS)  # [N]
        visible = (position >= first_key) & (position < end_key)
        # What lies in the table beyond the last key is never loaded, let alone followed.
        return tl.load(table + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)


@triton.jit
def _tanh(x):
    """Near zero Lambert's continued fraction: a quotient of exponentials would cancel there."""
    square = tl.minimum(x * x, 1.0)
    above = 945.0 + square * (105.0 + square)
    near = x * above / (945.0 + square * (420.0 + 15.0 * square))
    magnitude = tl.where(x < 0.0, 0.0 - x, x)
    power = tl.exp2(magnitude * (-2.0 * LOG2_E))  # never overflows
    far = (1.0 - power) / (1.0 + power)
    return tl.where(magnitude < 1.0, near, tl.where(x < 0.0, 0.0 - far, far))


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    maximum,  # [M] of the scores so far
    total,  # [M] of the weights so far
    sums,  # [M, D'] of the weighted values so far
    queries,  # [M, D']
    row_position,  # [M]
    begin,  # a multiple of TILE_KEYS
    end,
    first_key,
    end_key,
    table,  # [max_blocks] int32
    key_head,
    value_head,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    key_scale_head,
    value_scale_head,
    key_scale_block_stride,
    key_scale_slot_stride,
    value_scale_block_stride,
    value_scale_slot_stride,
    score_scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # else every row sees every key of [begin, end)
):
    """Online softmax over the keys [begin, end) of one sequence under one KV head."""
    dim = tl.arange(0, PADDED_DIM)  # [D']
    lane = tl.arange(0, TILE_KEYS)  # [N]
    has_dim = dim < HEAD_DIM  # [D']
    # The ids of the next tile are carried in registers: a table load between the loop's head and
    # the addresses that depend on it would keep the loads of later tiles from being started early.
    if PAGED:
        block = _load_block_ids(table, begin, first_key, end, BLOCK_SIZE, TILE_KEYS)
    for start in range(begin, end, TILE_KEYS):
        position = start + lane  # [N]
        if PAGED:
            slot = position % BLOCK_SIZE  # [N]
            key_at = block * key_block_stride + slot * key_slot_stride  # [N]
            value_at = block * value_block_stride + slot * value_slot_stride  # [N]
            if HAS_SCALES:
                key_scale_at = block * key_scale_block_stride + slot * key_scale_slot_stride  # [N]
                value_scale_at = block * value_scale_block_stride + slot * value_scale_slot_stride
            block = _load_block_ids(table, start + TILE_KEYS, first_key, end, BLOCK_SIZE, TILE_KEYS)
        else:
            key_at = position.to(tl.int64) * key_slot_stride  # [N]
            value_at = position.to(tl.int64) * value_slot_stride  # [N]
            if HAS_SCALES:
                key_scale_at = position.to(tl.int64) * key_scale_slot_stride  # [N]
                value_scale_at = position.to(tl.int64) * value_scale_slot_stride  # [N]
        key_pointers = key_head + key_at[None, :] + dim[:, None]
        value_pointers = value_head + value_at[:, None] + dim[None, :]
        if MASKED:
            visible = (position >= first_key) & (position < end_key)  # [N]
            keys = tl.load(key_pointers, mask=visible[None, :] & has_dim[:, None], other=0.0)
            values = tl.load(value_pointers, mask=visible[:, None] & has_dim[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            keys = tl.load(key_pointers)  # [D', N]
            values = tl.load(value_pointers)  # [N, D']
        else:
            keys = tl.load(key_pointers, mask=has_dim[:, None], other=0.0)
            values = tl.load(value_pointers, mask=has_dim[None, :], other=0.0)
        if HAS_SCALES:
            present = (position >= first_key) & (position < end_key)  # [N]
            key_scales = tl.load(key_scale_head + key_scale_at, mask=present, other=0.0)  # [N]
            value_scales = tl.load(value_scale_head + value_scale_at, mask=present, other=0.0)
        if keys.dtype != queries.dtype:
            keys = keys.to(queries.dtype)
            values = values.to(queries.dtype)

        scores = tl.dot(queries, keys, input_precision="ieee")  # [M, N]
        if HAS_SCALES:
            scores *= key_scales[None, :]
        if HAS_SOFTCAP:
            scores = _tanh(scores * (score_scale / softcap))
            factor = softcap * LOG2_E
        else:
            factor = score_scale * LOG2_E
        if MASKED:
            sees = visible[None, :] & (position[None, :] <= row_position[:, None])  # [M, N]
            if HAS_WINDOW:
                sees = sees & (position[None, :] > row_position[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))

        peak = tl.maximum(maximum, tl.max(scores, 1) * factor)  # [M]
        # A row that has seen no key yet subtracts zero: infinities must not meet.
        shift = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak  # [M]
        weights = tl.exp2(scores * factor - shift[:, None])  # [M, N]
        shrink = tl.exp2(maximum - shift)  # [M]
        total = total * shrink + tl.sum(weights, 1)
        if HAS_SCALES:
            weights *= value_scales[None, :]
        sums = tl.dot(
            weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee"
        )
        maximum = peak
    return maximum, total, sums


# What changes from step to step must not make the compiler start again.
@triton.jit(do_not_specialize=["num_seqs", "capacity", "window", "table_stride"])
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    out,  # [T, H, D]
    key_cache,  # [num_blocks, Hkv, block_size, D]
    value_cache,  # [num_blocks, Hkv, block_size, D]
    key_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    value_scales,  # [num_blocks, Hkv, block_size] float32, of tokens, or anything
    block_tables,  # [S, max_blocks] int32
    context_lens,  # [S] int32
    query_starts,  # [S + 1] int32
    partials,  # [partial, Hkv, M, D] float32, of what is in several pieces
    partial_logs,  # [partial, Hkv, M] float32, log2 of the sum of weights
    num_seqs,
    capacity,
    scale,
    key_scale,
    value_scale,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    key_scale_slot_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    value_scale_slot_stride,
    table_stride,
    SEQS: tl.constexpr,  # S rounded up to a power of two
    GROUP: tl.constexpr,  # G, query heads per KV head
    HEAD_DIM: tl.constexpr,  # D
    PADDED_DIM: tl.constexpr,  # D rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # M, at least 16 and at least G
    TILE_KEYS: tl.constexpr,  # N, a power of two
    SHORT_TOKENS: tl.constexpr,
    SHORT: tl.constexpr,  # serve the sequences of up to SHORT_TOKENS rows, else the longer ones
    PAGED: tl.constexpr,  # else a table's first entry names the one block that holds it all
    SPLIT: tl.constexpr,  # a tile's keys may be cut into pieces, merged by merge_kernel
    MIN_PIECE_TILES: tl.constexpr,
    FIXED_PIECE_TILES: tl.constexpr,
    MOST_FIXED_PIECES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # keys and values are int8, with a scale for each token
    UPCAST: tl.constexpr,  # multiply in float32, for the interpreter, whose bf16 dot is wrong
):
    """One piece of the keys of one tile of query tokens under one KV head, by online softmax.

    Row r of the tile is query token r // G and query head r % G of the KV head's group, so keys
    and values are read once for the group. Grid: (Hkv, pieces on two axes) for short sequences,
    whose neighbouring heads may lie side by side in memory; (pieces, Hkv) for long ones, whose
    neighbouring tiles read the same keys.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0 if SHORT else 1).to(tl.int64)
    item = tl.program_id(1 if SHORT else 0)
    if SHORT:
        item += tl.program_id(2) * tl.num_programs(1)
    tiles, pieces = cut_work(
        context_lens, query_starts, num_seqs, window, capacity,
        SEQS, TILE_TOKENS, TILE_KEYS, SHORT_TOKENS, SHORT, HAS_WINDOW, SPLIT, MIN_PIECE_TILES,
        FIXED_PIECE_TILES, MOST_FIXED_PIECES,
    )  # fmt: skip
    items = tiles * pieces
    # Tiles of the end of a sequence have the most keys: start them first.
    item = tl.sum(items, 0) - 1 - item
    if item < 0:
        return
    sequence, local = find_item(items, item, SEQS)
    num_pieces = value_of(pieces, sequence, SEQS)
    tile = local // num_pieces
    piece = local % num_pieces

    context_len = tl.load(context_lens + sequence)
    first_row = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - first_row
    tile_begin = tile * TILE_TOKENS
    tile_end = tl.minimum(tile_begin + TILE_TOKENS, num_rows)
    past_len = context_len - num_rows

    row = tl.arange(0, TILE_ROWS)  # [M]
    dim = tl.arange(0, PADDED_DIM)  # [D']
    token = tile_begin + row // GROUP  # [M]
    head = kv_head * GROUP + row % GROUP  # [M]
    has_row = (token < tile_end) & (row < TILE_TOKENS * GROUP)  # [M]
    has_dim = dim < HEAD_DIM  # [D']
    row_position = past_len + token  # [M]
    flat_token = (first_row + token).to(tl.int64)  # [M]

    queries = tl.load(
        query
        + flat_token[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=has_row[:, None] & has_dim[None, :],
        other=0.0,
    )  # [M, D']
    if UPCAST:
        queries = queries.to(tl.float32)

    end_key = past_len + tile_end
    first_key = tl.maximum(past_len + tile_begin - window + 1, 0) if HAS_WINDOW else 0
    begin = first_key // TILE_KEYS * TILE_KEYS
    end = end_key
    if SPLIT:
        key_tiles = (end_key - begin + TILE_KEYS - 1) // TILE_KEYS
        piece_keys = (key_tiles + num_pieces - 1) // num_pieces * TILE_KEYS
        begin += piece * piece_keys
        end = tl.minimum(begin + piece_keys, end_key)  # the last pieces may be empty

    maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)  # [M]
    total = tl.zeros([TILE_ROWS], tl.float32)  # [M]
    sums = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)  # [M, D']
    score_scale = scale * key_scale
    table = block_tables + sequence.to(tl.int64) * table_stride
    key_head = key_cache + kv_head * key_head_stride
    value_head = value_cache + kv_head * value_head_stride
    key_scale_head = key_scales + kv_head * key_scale_head_stride
    value_scale_head = value_scales + kv_head * value_scale_head_stride
    if not PAGED:
        only = tl.load(table).to(tl.int64)
        key_head += only * key_block_stride
        value_head += only * value_block_stride
        key_scale_head += only * key_scale_block_stride
        value_scale_head += only * value_scale_block_stride
    masked_begin = begin
    if (not SHORT) and (not HAS_WINDOW):
        # Keys before the tile's first row are seen by all of it: no masks. (Short tiles wait for
        # memory, not for arithmetic, and two loops would fill the pipeline twice.)
        masked_begin = tl.minimum((past_len + tile_begin + 1) // TILE_KEYS * TILE_KEYS, end)
        masked_begin = tl.maximum(masked_begin, begin)
        maximum, total, sums = _attend_keys(
            maximum, total, sums, queries, row_position,
            begin, masked_begin, first_key, end_key, table, key_head, value_head,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            key_scale_head, value_scale_head, key_scale_block_stride, key_scale_slot_stride,
            value_scale_block_stride, value_scale_slot_stride,
            score_scale, softcap, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS,
            PAGED, HAS_SCALES, HAS_WINDOW, HAS_SOFTCAP, False,
        )  # fmt: skip
    maximum, total, sums = _attend_keys(
        maximum, total, sums, queries, row_position,
        masked_begin, end, first_key, end_key, table, key_head, value_head,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        key_scale_head, value_scale_head, key_scale_block_stride, key_scale_slot_stride,
        value_scale_block_stride, value_scale_slot_stride,
        score_scale, softcap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS,
        PAGED, HAS_SCALES, HAS_WINDOW, HAS_SOFTCAP, True,
    )  # fmt: skip

    seen = total > 0.0  # [M] rows of padding, and of a piece that lies beyond the row, see nothing
    attended = sums / tl.where(seen, total, 1.0)[:, None] * value_scale  # [M, D']
    whole = True
    if SPLIT:
        whole = num_pieces == 1
        if num_pieces > 1:
            partial = (first_partial(tiles, pieces, sequence, SEQS) + local).to(tl.int64)
            flat_row = (partial * tl.num_programs(0 if SHORT else 1) + kv_head) * TILE_ROWS + row
            tl.store(
                partials + flat_row[:, None] * HEAD_DIM + dim[None, :],
                attended,
                mask=has_row[:, None] & has_dim[None, :],
            )
            logs = tl.where(seen, maximum + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
            tl.store(partial_logs + flat_row, logs, mask=has_row)
    if whole:
        tl.store(
            out
            + flat_token[:, None] * out_token_stride
            + head[:, None] * out_head_stride
            + dim[None, :],
            attended.to(out.dtype.element_ty),
            mask=has_row[:, None] & has_dim[None, :],
        )
