"""CPU attention of a tile of few query rows, as in decode.

The lanes of a vector lie along D; or, where pairs of bfloat16 are multiplied, scores' are keys (see
decode_bf16_dot). What differs between the two are two functions, and the inner loops, which the
tag's type decides.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to learn what to compile

import math

from numba import njit, types
from numba.extending import overload

from kernels.cpu.attention.decode_bf16_dot import load_row_pairs, score_pair_rows
from kernels.cpu.attention.softmax_ir import softcap_chunk, softmax_row
from kernels.cpu.attention.tile_ir import (
    elements_per_step,
    fetch_rows,
    fill_chunk,
    scale_chunk,
    score_keys,
    value_rows,
)
from kernels.cpu.attention.tile_keys import LOG2_E, locate_tile, row_address, score_scale
from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.bf16_dot import is_pair_tag
from kernels.cpu.runtime.memory import field, item_bytes, load_element, store_element
from kernels.cpu.runtime.simd import float32_tag


@njit
def attend_rows(
    job, tag, scratch, sequence, first_head, num_heads, first_token, num_tokens, position
):
    """``tag`` types the elements, or says that they are multiplied by pairs.

    Row r of a KV head is query token r // G and query head r % G of its group. Heads take turns
    with every tile of keys, since those of a block lie side by side in memory.
    """
    group = field(job, fields.GROUP)
    head_dim = field(job, fields.HEAD_DIM)
    window = field(job, fields.WINDOW)
    scale = score_scale(job)
    rows = num_tokens * group
    wide = 4 * head_dim
    keys = scratch  # this turn's addresses; the next turn's lie behind them
    values = keys + 16 * fields.KV_TILE
    query = values + 16 * fields.KV_TILE  # [heads, R, D] float32, scaled, or half of it, pairs
    sums = query + num_heads * rows * wide  # [heads, R, D] float32
    scores = sums + num_heads * rows * wide  # [R, KV_TILE] float32, of one head
    alpha = scores + rows * 4 * fields.KV_TILE  # [R], of one head
    maximum = alpha + 4 * rows  # [heads, R]
    total = maximum + 4 * num_heads * rows  # [heads, R]
    spare = total + 4 * num_heads * rows  # KV_TILE / 2 * D numbers of 32 bits, and more
    all_rows = num_heads * rows
    _load_rows(
        job, tag, first_head, first_token, rows, all_rows, scale, query, sums, maximum, total
    )

    begin = max(0, position - window + 1)
    end = position + num_tokens
    ahead = 8 * fields.KV_TILE
    stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
    locate_tile(job, sequence, first_head, begin, stop, keys, values)
    while begin < end:
        stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        base = begin - begin % 16
        count = stop - base
        for head in range(num_heads):
            # Blocks lie anywhere, so the hardware cannot foresee where the next turn's are. Where a
            # table ends are older addresses: to bring those in costs nothing.
            coming, next_keys, next_values = ahead, keys + ahead, values + ahead
            if head + 1 < num_heads:
                behind = first_head + head + 1
                locate_tile(job, sequence, behind, begin, stop, next_keys, next_values)
            elif stop < end:
                following = min(end, stop + fields.KV_TILE)
                locate_tile(job, sequence, first_head, stop, following, next_keys, next_values)
            else:
                coming = 0
            row = head * rows
            _score_rows(
                tag, rows, head_dim, keys, count, query + row * wide, scale, scores, keys + coming,
                spare,
            )  # fmt: skip
            _weigh_scores(
                job, tag, rows, base, count, position, scores, maximum + 4 * row, total + 4 * row,
                alpha, values + coming,
            )  # fmt: skip
            _weigh_values(
                tag, rows, head_dim, values, count, scores, alpha, sums + row * wide,
                values + coming,
            )  # fmt: skip
            keys, values, ahead = next_keys, next_values, -ahead
        begin = stop

    _store_rows(job, tag, first_head, first_token, rows, all_rows, sums, total)


@njit
def _load_rows(
    job, tag, first_head, first_token, rows, all_rows, scale, query, sums, maximum, total
):
    """Queries as scores want them; nothing is summed up yet."""
    group, head_dim = field(job, fields.GROUP), field(job, fields.HEAD_DIM)
    token_bytes, head_bytes = field(job, fields.QUERY_TOKEN), field(job, fields.QUERY_HEAD)
    source = field(job, fields.QUERY) + first_token * token_bytes
    for row in range(all_rows):
        head = first_head + row // rows
        at = source + head * group * head_bytes
        at = row_address(at, token_bytes, head_bytes, group, row % rows)
        _load(tag, at, scale, head_dim, query + 4 * row * head_dim)
        for d in range(0, head_dim, 16):
            fill_chunk(sums + 4 * (row * head_dim + d), types.float32(0.0))
        store_element(float32_tag, maximum + 4 * row, -math.inf)
        store_element(float32_tag, total + 4 * row, 0.0)


@njit
def _weigh_scores(
    job, tag, rows, base, count, position, scores, maximum, total, alpha, next_values
):
    """Scores of one head [R, KV_TILE] become weights; rows do not see later keys.

    The first score is that of the key at position ``base``. By pairs, what was asked of the memory
    before lasts for about one row; with each further one some of the next values are brought in.
    """
    head_chunks = field(job, fields.HEAD_DIM) // 16
    group, window = field(job, fields.GROUP), field(job, fields.WINDOW)
    softcap = load_element(float32_tag, job + 8 * fields.SOFTCAP)
    chunks = (count + 15) // 16
    for r in range(rows):
        row = scores + r * 4 * fields.KV_TILE
        if softcap != 0:
            for chunk in range(chunks):
                softcap_chunk(row + 64 * chunk, softcap, LOG2_E)
        seen = position + r // group  # the last key that this row sees
        for n in range(max(0, min(count, seen + 1 - base)), 16 * chunks):
            store_element(float32_tag, row + 4 * n, -math.inf)
        for n in range(min(count, seen - window + 1 - base)):
            store_element(float32_tag, row + 4 * n, -math.inf)
        if r > 0 and chunks == fields.KV_TILE // 16 and elements_per_step(tag) == 2:
            coming = next_values + 8 * 16 * (r % 4)
            fetch_rows(tag, coming, min(16, 64 // head_chunks), head_chunks)
        softmax_row(tag, row, chunks, maximum + 4 * r, total + 4 * r, alpha + 4 * r)


@njit
def _store_rows(job, tag, first_head, first_token, rows, all_rows, sums, total):
    """Shares of the totals, rounded."""
    group, head_dim = field(job, fields.GROUP), field(job, fields.HEAD_DIM)
    token_bytes, head_bytes = field(job, fields.OUT_TOKEN), field(job, fields.OUT_HEAD)
    target = field(job, fields.OUT) + first_token * token_bytes
    for row in range(all_rows):
        head = first_head + row // rows
        at = target + head * group * head_bytes
        at = row_address(at, token_bytes, head_bytes, group, row % rows)
        share = types.float32(1 / load_element(float32_tag, total + 4 * row))
        for d in range(0, head_dim, 16):
            place = sums + 4 * (row * head_dim + d)
            scale_chunk(float32_tag, tag, place, share, at + d * item_bytes(tag))


def _load_elements(tag, source, scale, head_dim, target):
    """One row's query in float32, scaled."""
    for d in range(0, head_dim, 16):
        scale_chunk(tag, float32_tag, source + d * item_bytes(tag), scale, target + 4 * d)


def _score_element_rows(tag, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """scores [rows, KV_TILE] = query @ keys, in register blocks of rows; the usual D unrolled."""
    chunks = head_dim // 16
    if chunks == 4:
        _score_blocks(tag, 4, rows, chunks, keys, count, query, scores, next_keys)
    elif chunks == 8:
        _score_blocks(tag, 8, rows, chunks, keys, count, query, scores, next_keys)
    else:
        _score_blocks(tag, 0, rows, chunks, keys, count, query, scores, next_keys)


def _load(tag, source, scale, head_dim, target):
    """Bring in one row's query. Numba puts one of two functions in its place."""
    raise NotImplementedError


def _score_rows(tag, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """Scores [rows, KV_TILE] of a tile's keys, while the next ones are brought in; likewise."""
    raise NotImplementedError


@overload(_load)
def _choose_load(tag, source, scale, head_dim, target):
    return load_row_pairs if is_pair_tag(tag) else _load_elements


@overload(_score_rows)
def _choose_score(tag, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    return score_pair_rows if is_pair_tag(tag) else _score_element_rows


@njit
def _score_blocks(tag, unrolled, rows, chunks, keys, count, query, scores, next_keys):
    wide, step = 64 * chunks, 4 * fields.KV_TILE
    if rows >= 4:
        score_keys(tag, 4, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 4
    elif rows >= 2:
        score_keys(tag, 2, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 2
    else:
        score_keys(tag, 1, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 1
    while r + 4 <= rows:
        score_keys(
            tag, 4, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys,
        )  # fmt: skip
        r += 4
    while r < rows:
        score_keys(
            tag, 1, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys,
        )  # fmt: skip
        r += 1


@njit
def _weigh_values(tag, rows, head_dim, values, count, weights, alpha, sums, next_values):
    """sums[r] = sums[r] * alpha[r] + weights[r] @ values, in register blocks of rows x 64."""
    per_step = elements_per_step(tag)
    steps = (count + per_step - 1) // per_step
    wide, step = 4 * head_dim, 4 * fields.KV_TILE
    d = 0
    while d < head_dim:
        at, o = d * item_bytes(tag), sums + 4 * d
        if d + 64 <= head_dim:
            _weigh_columns(
                tag, 4, rows, values, at, steps, weights, step, alpha, o, wide, next_values
            )
            d += 64
        else:
            _weigh_columns(
                tag, 1, rows, values, at, steps, weights, step, alpha, o, wide, next_values
            )
            d += 16


@njit
def _weigh_columns(
    tag, vectors, rows, values, at, count, weights, step, alpha, sums, wide, next_values
):
    """The same for some columns of D; the first block of rows brings in those of the next turn."""
    if rows >= 4:
        value_rows(
            tag, 4, vectors, 1, values, at, count, weights, step, alpha, sums, wide, next_values
        )
        r = 4
    else:
        value_rows(
            tag, 1, vectors, 1, values, at, count, weights, step, alpha, sums, wide, next_values
        )
        r = 1
    while r + 4 <= rows:
        p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide
        value_rows(tag, 4, vectors, 0, values, at, count, p, step, a, o, wide, values)
        r += 4
    while r < rows:
        p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide
        value_rows(tag, 1, vectors, 0, values, at, count, p, step, a, o, wide, values)
        r += 1
