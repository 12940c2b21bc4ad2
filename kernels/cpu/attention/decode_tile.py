"""Decode tiles: CPU attention of few query rows; with AMX, of any number of rows.

The lanes of a vector lie along D; with dot products of bf16 pairs the lanes of scores are keys (see
decode_bf16_dot). Some functions differ between these and AMX (see amx_tile), and the inner loops,
by the tag's type.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

import math

from numba import njit, types
from numba.extending import overload

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.amx_tile import (
    begin_amx_tile,
    end_amx_tile,
    load_amx_row,
    score_amx_rows,
    weigh_amx_values,
)
from kernels.cpu.attention.decode_bf16_dot import load_row_pairs, score_pair_rows
from kernels.cpu.attention.kv_types_ir import has_scales
from kernels.cpu.attention.softmax_ir import decode_softmax, softcap_chunk
from kernels.cpu.attention.tile_ir import (
    decode_scores,
    decode_values,
    elements_per_step,
    fetch_rows,
    fill_chunk,
    keys_multiple,
    multiply_chunk,
    scale_chunk,
)
from kernels.cpu.attention.tile_keys import (
    LOG2_E,
    fetch_scales,
    load_scales,
    locate_tile,
    row_address,
    score_scale,
)
from kernels.cpu.runtime.bf16_dot import is_amx_tag, is_bf16_dot_tag
from kernels.cpu.runtime.memory import field, item_bytes, load_element, store_element
from kernels.cpu.runtime.simd import float32_tag


@njit
def attend_decode_tile(
    args, tag, kv, scratch, sequence, first_head, num_heads, first_token, num_tokens, position
):
    """Attend for the rows of one tile under some KV heads.

    Row r of a KV head is query token r // G and query head r % G of its group. Every tile of keys
    is computed for one KV head after the other, since their keys lie side by side in a block.
    """
    group = field(args, fields.GROUP)
    head_dim = field(args, fields.HEAD_DIM)
    window = field(args, fields.WINDOW)
    scale = score_scale(args)
    rows = num_tokens * group
    wide = 4 * head_dim
    keys = scratch  # addresses of this tile under this head; those of the next one lie behind
    values = keys + 16 * fields.KV_TILE
    scales = values + 16 * fields.KV_TILE  # [2, KV_TILE] float32, of keys and of values
    query = scales + 8 * fields.KV_TILE  # [heads, R, D] float32, scaled, or half of it, pairs
    sums = query + num_heads * rows * wide  # [heads, R, D] float32
    scores = sums + num_heads * rows * wide  # [R, KV_TILE] float32, of one head
    alpha = scores + rows * 4 * fields.KV_TILE  # [R], of one head
    maximum = alpha + 4 * rows  # [heads, R]
    total = maximum + 4 * num_heads * rows  # [heads, R]
    spare = total + 4 * num_heads * rows  # at least KV_TILE / 2 * D numbers of 32 bits
    all_rows = num_heads * rows
    _begin(tag, rows, head_dim, spare)
    _load_rows(
        args, tag, first_head, first_token, rows, all_rows, scale, query, sums, maximum, total
    )

    begin = max(0, position - window + 1)
    end = position + num_tokens
    ahead = 8 * fields.KV_TILE
    stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
    multiple = keys_multiple(tag)
    _locate(args, tag, kv, sequence, first_head, begin, stop, keys, values)
    while begin < end:
        stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        base = begin - begin % multiple
        count = stop - base
        for head in range(num_heads):
            # Blocks lie anywhere, so the hardware cannot predict the next addresses. Behind the end
            # of a table are older addresses: to prefetch those costs nothing.
            coming, next_keys, next_values = ahead, keys + ahead, values + ahead
            if head + 1 < num_heads:
                behind = first_head + head + 1
                _locate(args, tag, kv, sequence, behind, begin, stop, next_keys, next_values)
            elif stop < end:
                following = min(end, stop + fields.KV_TILE)
                _locate(
                    args, tag, kv, sequence, first_head, stop, following, next_keys, next_values
                )
            else:
                coming = 0
            if has_scales(kv):
                load_scales(args, sequence, first_head + head, begin, stop, multiple, scales)
            row = head * rows
            _score_rows(
                tag, kv, rows, head_dim, keys, count, query + row * wide, scale, scores,
                keys + coming, spare,
            )  # fmt: skip
            _weigh_scores(
                args, tag, kv, rows, base, count, position, scores, maximum + 4 * row,
                total + 4 * row, alpha, scales, values + coming,
            )  # fmt: skip
            _weigh(
                tag, kv, rows, head_dim, values, count, scores, alpha, sums + row * wide,
                values + coming, spare,
            )  # fmt: skip
            keys, values, ahead = next_keys, next_values, -ahead
        begin = stop

    _store_rows(args, tag, first_head, first_token, rows, all_rows, sums, total)
    _end(tag, head_dim, spare)


@njit
def _locate(args, tag, kv, sequence, head, begin, end, keys, values):
    """Find a tile's keys and values, and prefetch their scales: the others are prefetched later."""
    locate_tile(args, sequence, head, begin, end, keys_multiple(tag), keys, values)
    if has_scales(kv):
        fetch_scales(args, sequence, head, begin, end)


@njit
def _load_rows(
    args, tag, first_head, first_token, rows, all_rows, scale, query, sums, maximum, total
):
    """Load queries as the score loops read them, and clear sums, maxima and totals."""
    group, head_dim = field(args, fields.GROUP), field(args, fields.HEAD_DIM)
    token_bytes, head_bytes = field(args, fields.QUERY_TOKEN), field(args, fields.QUERY_HEAD)
    source = field(args, fields.QUERY) + first_token * token_bytes
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
    args, tag, kv, rows, base, count, position, scores, maximum, total, alpha, scales, next_values
):
    """Turn scores of one head [R, KV_TILE] into weights; rows do not see later keys.

    The first score is that of the key at position ``base``. With bf16 pairs, earlier prefetches
    keep memory busy for about one row; each further row prefetches some of the next values.
    """
    head_chunks = field(args, fields.HEAD_DIM) // 16
    group, window = field(args, fields.GROUP), field(args, fields.WINDOW)
    softcap = load_element(float32_tag, args + 8 * fields.SOFTCAP)
    multiple = keys_multiple(tag)
    chunks = (count + multiple - 1) // multiple * (multiple // 16)
    fetches = chunks == fields.KV_TILE // 16 and elements_per_step(tag) == 2 and multiple == 16
    for r in range(rows):
        row = scores + r * 4 * fields.KV_TILE
        if has_scales(kv):
            for chunk in range(chunks):
                multiply_chunk(row + 64 * chunk, scales + 64 * chunk)
        if softcap != 0:
            for chunk in range(chunks):
                softcap_chunk(row + 64 * chunk, softcap, LOG2_E)
        seen = position + r // group  # the last key that this row sees
        for n in range(max(0, min(count, seen + 1 - base)), 16 * chunks):
            store_element(float32_tag, row + 4 * n, -math.inf)
        for n in range(min(count, seen - window + 1 - base)):
            store_element(float32_tag, row + 4 * n, -math.inf)
        if r > 0 and fetches:
            coming = next_values + 8 * 16 * (r % 4)
            fetch_rows(kv, coming, min(16, 64 // head_chunks), head_chunks)
        decode_softmax(
            tag, kv, row, chunks, maximum + 4 * r, total + 4 * r, alpha + 4 * r,
            scales + 4 * fields.KV_TILE,
        )  # fmt: skip


@njit
def _store_rows(args, tag, first_head, first_token, rows, all_rows, sums, total):
    """Store sums divided by totals, rounded."""
    group, head_dim = field(args, fields.GROUP), field(args, fields.HEAD_DIM)
    token_bytes, head_bytes = field(args, fields.OUT_TOKEN), field(args, fields.OUT_HEAD)
    target = field(args, fields.OUT) + first_token * token_bytes
    for row in range(all_rows):
        head = first_head + row // rows
        at = target + head * group * head_bytes
        at = row_address(at, token_bytes, head_bytes, group, row % rows)
        share = types.float32(1 / load_element(float32_tag, total + 4 * row))
        for d in range(0, head_dim, 16):
            place = sums + 4 * (row * head_dim + d)
            scale_chunk(float32_tag, tag, place, share, at + d * item_bytes(tag))


def _load_elements(tag, source, scale, head_dim, target):
    """Store one row's query in float32, scaled."""
    for d in range(0, head_dim, 16):
        scale_chunk(tag, float32_tag, source + d * item_bytes(tag), scale, target + 4 * d)


def _begin_nothing(tag, rows, head_dim, spare):
    """Registers need no preparation."""


def _end_nothing(tag, head_dim, spare):
    """Likewise."""


def _score_element_rows(
    tag, kv, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
):
    """scores [rows, KV_TILE] = query @ keys, in register blocks of rows; the usual D unrolled."""
    chunks = head_dim // 16
    if chunks == 4:
        _score_blocks(kv, 4, rows, chunks, keys, count, query, scores, next_keys)
    elif chunks == 8:
        _score_blocks(kv, 8, rows, chunks, keys, count, query, scores, next_keys)
    else:
        _score_blocks(kv, 0, rows, chunks, keys, count, query, scores, next_keys)


def _load(tag, source, scale, head_dim, target):
    """Load one row's query. Never called: numba puts one of three functions in its place."""
    raise NotImplementedError


def _score_rows(tag, kv, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """Scores [rows, KV_TILE] of a tile's keys, prefetching the next keys. Likewise replaced."""
    raise NotImplementedError


def _weigh(tag, kv, rows, head_dim, values, count, weights, alpha, sums, next_values, spare):
    """sums[r] = sums[r] * alpha[r] + weights[r] @ values. Likewise replaced."""
    raise NotImplementedError


def _begin(tag, rows, head_dim, spare):
    """Prepare for so many rows under a KV head. Likewise replaced."""
    raise NotImplementedError


def _end(tag, head_dim, spare):
    """Give up what was prepared. Likewise replaced."""
    raise NotImplementedError


@overload(_load)
def _choose_load(tag, source, scale, head_dim, target):
    if is_amx_tag(tag):
        return load_amx_row
    return load_row_pairs if is_bf16_dot_tag(tag) else _load_elements


@overload(_score_rows)
def _choose_score(tag, kv, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    if is_amx_tag(tag):
        return score_amx_rows
    return score_pair_rows if is_bf16_dot_tag(tag) else _score_element_rows


@overload(_weigh)
def _choose_weigh(tag, kv, rows, head_dim, values, count, weights, alpha, sums, next_values, spare):
    return weigh_amx_values if is_amx_tag(tag) else _weigh_values


@overload(_begin)
def _choose_begin(tag, rows, head_dim, spare):
    return begin_amx_tile if is_amx_tag(tag) else _begin_nothing


@overload(_end)
def _choose_end(tag, head_dim, spare):
    return end_amx_tile if is_amx_tag(tag) else _end_nothing


@njit
def _score_blocks(kv, unrolled, rows, chunks, keys, count, query, scores, next_keys):
    wide, step = 64 * chunks, 4 * fields.KV_TILE
    if rows >= 4:
        decode_scores(kv, 4, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 4
    elif rows >= 2:
        decode_scores(kv, 2, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 2
    else:
        decode_scores(kv, 1, unrolled, 1, keys, count, query, wide, chunks, scores, step, next_keys)
        r = 1
    while r + 4 <= rows:
        decode_scores(
            kv, 4, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys,
        )  # fmt: skip
        r += 4
    while r < rows:
        decode_scores(
            kv, 1, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys,
        )  # fmt: skip
        r += 1


def _weigh_values(tag, kv, rows, head_dim, values, count, weights, alpha, sums, next_values, spare):
    """sums[r] = sums[r] * alpha[r] + weights[r] @ values, in register blocks of rows x 64."""
    per_step = elements_per_step(tag)
    steps = (count + per_step - 1) // per_step
    wide, step = 4 * head_dim, 4 * fields.KV_TILE
    d = 0
    while d < head_dim:
        at, o = d * item_bytes(kv), sums + 4 * d
        if d + 64 <= head_dim:
            _weigh_elements(
                tag, kv, 4, rows, values, at, steps, weights, step, alpha, o, wide, next_values
            )
            d += 64
        else:
            _weigh_elements(
                tag, kv, 1, rows, values, at, steps, weights, step, alpha, o, wide, next_values
            )
            d += 16


@njit
def _weigh_elements(
    tag, kv, vectors, rows, values, at, count, weights, step, alpha, sums, wide, next_values
):
    """The same for some elements of D; the first block of rows prefetches the next values."""
    if rows >= 4:
        decode_values(
            tag, kv, 4, vectors, 1, values, at, count, weights, step, alpha, sums, wide, next_values
        )
        r = 4
    else:
        decode_values(
            tag, kv, 1, vectors, 1, values, at, count, weights, step, alpha, sums, wide, next_values
        )
        r = 1
    while r + 4 <= rows:
        p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide
        decode_values(tag, kv, 4, vectors, 0, values, at, count, p, step, a, o, wide, values)
        r += 4
    while r < rows:
        p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide
        decode_values(tag, kv, 1, vectors, 0, values, at, count, p, step, a, o, wide, values)
        r += 1
