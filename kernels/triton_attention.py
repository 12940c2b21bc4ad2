"""The Triton kernel of paged attention. Symbols are explained in ``kernels/README.md``."""

import triton
import triton.language as tl

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
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    out,  # [T, H, D]
    key_cache,  # [num_blocks, Hkv, block_size, D]
    value_cache,  # [num_blocks, Hkv, block_size, D]
    block_tables,  # [S, max_blocks] int32
    context_lens,  # [S] int32
    query_starts,  # [S + 1] int32
    scale,
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
    table_stride,
    GROUP: tl.constexpr,  # G, query heads per KV head
    HEAD_DIM: tl.constexpr,  # D
    PADDED_DIM: tl.constexpr,  # D rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # M, at least 16 and at least G
    TILE_KEYS: tl.constexpr,  # N, a power of two
    DECODE: tl.constexpr,  # serve the sequences of one row, else those of several
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, for the interpreter, whose bf16 dot is wrong
):
    """One tile of query tokens of one sequence under one KV head, by online softmax.

    Row r of the tile is query token r // G and query head r % G of the KV head's group, so keys
    and values are read once for the group. Grid: (tiles of the longest sequence, Hkv, S); lengths
    are read here, so a launch captured in a graph serves any batch that its grid covers.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    context_len = tl.load(context_lens + sequence)
    first_row = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - first_row
    if (num_rows <= 0) | (context_len <= 0):
        return
    if DECODE:
        if num_rows != 1:
            return
    else:
        if num_rows == 1:
            return

    TILE_TOKENS: tl.constexpr = 1 if DECODE else TILE_ROWS // GROUP
    # The last tile has the most keys: start it first.
    tile = (num_rows + TILE_TOKENS - 1) // TILE_TOKENS - 1 - tl.program_id(0)
    if tile < 0:
        return
    tile_begin = tile * TILE_TOKENS
    tile_end = tl.minimum(tile_begin + TILE_TOKENS, num_rows)
    past_len = context_len - num_rows

    row = tl.arange(0, TILE_ROWS)  # [M]
    dim = tl.arange(0, PADDED_DIM)  # [D']
    lane = tl.arange(0, TILE_KEYS)  # [N]
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

    maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)  # [M]
    total = tl.zeros([TILE_ROWS], tl.float32)  # [M]
    sums = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)  # [M, D']
    table = block_tables + sequence.to(tl.int64) * table_stride
    key_head = key_cache + kv_head * key_head_stride
    value_head = value_cache + kv_head * value_head_stride

    # The ids of the next tile are carried in registers: a table load between the loop's head and
    # the addresses that depend on it would keep the loads of later tiles from being started early.
    block = _load_block_ids(table, begin, first_key, end_key, BLOCK_SIZE, TILE_KEYS)
    for start in range(begin, end_key, TILE_KEYS):
        position = start + lane  # [N]
        visible = (position >= first_key) & (position < end_key)  # [N]
        slot = position % BLOCK_SIZE  # [N]
        key_at = block * key_block_stride + slot * key_slot_stride  # [N]
        value_at = block * value_block_stride + slot * value_slot_stride  # [N]
        keys = tl.load(
            key_head + key_at[None, :] + dim[:, None],
            mask=visible[None, :] & has_dim[:, None],
            other=0.0,
        )  # [D', N]
        values = tl.load(
            value_head + value_at[:, None] + dim[None, :],
            mask=visible[:, None] & has_dim[None, :],
            other=0.0,
        )  # [N, D']
        block = _load_block_ids(table, start + TILE_KEYS, first_key, end_key, BLOCK_SIZE, TILE_KEYS)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)

        scores = tl.dot(queries, keys, input_precision="ieee")  # [M, N]
        if HAS_SOFTCAP:
            scores = _tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
        else:
            scores = scores * (scale * LOG2_E)
        sees = visible[None, :] & (position[None, :] <= row_position[:, None])  # [M, N]
        if HAS_WINDOW:
            sees = sees & (position[None, :] > row_position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))

        peak = tl.maximum(maximum, tl.max(scores, 1))  # [M]
        # A row that has seen no key yet subtracts zero: infinities must not meet.
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # [M]
        weights = tl.exp2(scores - shift[:, None])  # [M, N]
        shrink = tl.exp2(maximum - shift)  # [M]
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(
            weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee"
        )
        maximum = peak

    total = tl.where(has_row, total, 1.0)
    attended = sums / total[:, None]  # [M, D']
    tl.store(
        out
        + flat_token[:, None] * out_token_stride
        + head[:, None] * out_head_stride
        + dim[None, :],
        attended.to(out.dtype.element_ty),
        mask=has_row[:, None] & has_dim[None, :],
    )
