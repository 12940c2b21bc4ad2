"""The CPU kernel of paged attention: tiles of query rows claimed by threads.

Threads enter the kernel at the same time; each claims tasks from the job's counter until none is
left. A task is one tile of query tokens of one sequence under one KV head, so keys and values are
read once for the whole group of query heads.
"""

import math

from numba import njit, types

from kernels import cpu_jobs as fields
from kernels.cpu_columns import attend_columns
from kernels.cpu_keys import LOG2_E, locate_keys
from kernels.cpu_memory import claim, field, item_bytes, load_element, load_i32, store_element
from kernels.cpu_simd import float32_tag
from kernels.cpu_tiles import (
    scale_chunk,
    score_keys,
    softcap_chunk,
    softmax_row,
    value_rows,
)


@njit
def attend_tasks(job, tag, column_tag):
    """Claim tiles until none is left.

    ``tag`` types the elements (see cpu_simd); ``column_tag`` is the same, or says that they are
    multiplied by pairs where there are many rows (see cpu_pairs).
    """
    num_seqs = field(job, fields.NUM_SEQS)
    num_kv_heads = field(job, fields.NUM_KV_HEADS)
    tile_tokens = field(job, fields.TILE_TOKENS)
    lens = field(job, fields.CONTEXT_LENS)  # [S] int32
    starts = field(job, fields.QUERY_STARTS)  # [S + 1] int32
    thread = claim(job + 8 * fields.NEXT_THREAD)
    scratch = field(job, fields.SCRATCH) + thread * field(job, fields.SCRATCH_BYTES)
    # Tasks are numbered sequence by sequence; a thread's claims only grow, so it walks along.
    sequence = -1
    tasks_before, tasks_here = 0, 0
    while True:
        task = claim(job + 8 * fields.NEXT_TASK)
        while task >= tasks_before + tasks_here:
            tasks_before += tasks_here
            sequence += 1
            if sequence >= num_seqs:
                return
            rows = load_i32(starts + 4 * sequence + 4) - load_i32(starts + 4 * sequence)
            tasks_here = (rows + tile_tokens - 1) // tile_tokens * num_kv_heads
            if load_i32(lens + 4 * sequence) <= 0:
                tasks_here = 0
        tile, head = divmod(task - tasks_before, num_kv_heads)
        first = tile * tile_tokens
        start = load_i32(starts + 4 * sequence)
        num_rows = load_i32(starts + 4 * sequence + 4) - start
        num_tokens = min(tile_tokens, num_rows - first)
        position = load_i32(lens + 4 * sequence) - num_rows + first
        if num_tokens * field(job, fields.GROUP) < fields.MIN_COLUMN_ROWS:
            _attend_rows(job, tag, scratch, sequence, head, start + first, num_tokens, position)
        else:
            attend_columns(
                job, column_tag, scratch, sequence, head, start + first, num_tokens, position
            )


@njit
def _attend_rows(job, tag, scratch, sequence, head, first_token, num_tokens, position):
    """A tile of few rows, as in decode: the lanes of a vector lie along D.

    Row r is query token r // G and query head r % G of the KV head's group.
    """
    group = field(job, fields.GROUP)
    head_dim = field(job, fields.HEAD_DIM)
    window = field(job, fields.WINDOW)
    scale = load_element(float32_tag, job + 8 * fields.SCALE)
    softcap = load_element(float32_tag, job + 8 * fields.SOFTCAP)
    if softcap == 0:
        scale *= LOG2_E
    rows = num_tokens * group
    wide = 4 * head_dim
    keys = scratch  # this tile's addresses; the next tile's lie behind them
    values = keys + 16 * fields.KV_TILE
    query = values + 16 * fields.KV_TILE  # [R, D] float32, scaled
    sums = query + rows * wide  # [R, D] float32
    scores = sums + rows * wide  # [R, KV_TILE] float32
    maximum = scores + rows * 4 * fields.KV_TILE  # [R]
    total = maximum + 4 * rows  # [R]
    alpha = total + 4 * rows  # [R]

    source = field(job, fields.QUERY) + first_token * field(job, fields.QUERY_TOKEN)
    source += head * group * field(job, fields.QUERY_HEAD)
    for r in range(rows):
        token, member = divmod(r, group)
        at = source + token * field(job, fields.QUERY_TOKEN)
        at += member * field(job, fields.QUERY_HEAD)
        for d in range(0, head_dim, 16):
            from_at, to_at = at + d * item_bytes(tag), query + r * wide + 4 * d
            scale_chunk(tag, float32_tag, from_at, scale, to_at)
        for d in range(head_dim):
            store_element(float32_tag, sums + r * wide + 4 * d, 0.0)
        store_element(float32_tag, maximum + 4 * r, -math.inf)
        store_element(float32_tag, total + 4 * r, 0.0)

    begin = max(0, position - window + 1)
    end = position + num_tokens
    ahead = 8 * fields.KV_TILE
    stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
    locate_keys(job, sequence, head, begin, stop, keys, values)
    while begin < end:
        stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        count = stop - begin
        chunks = (count + 15) // 16
        following = min(end, stop + fields.KV_TILE)
        locate_keys(job, sequence, head, stop, following, keys + ahead, values + ahead)
        # Blocks lie anywhere, so the hardware cannot foresee where the next tile is. Where a table
        # ends are older addresses: to bring those in costs nothing.
        coming = ahead if following > stop else 0
        _score_tile_rows(
            tag, rows, head_dim // 16, keys, count, query, scores, keys + coming, values + coming
        )
        for r in range(rows):
            row = scores + r * 4 * fields.KV_TILE
            if softcap != 0:
                for chunk in range(chunks):
                    softcap_chunk(row + 64 * chunk, softcap, LOG2_E)
            seen = position + r // group  # the last key that this row sees
            for n in range(max(0, min(count, seen + 1 - begin)), 16 * chunks):
                store_element(float32_tag, row + 4 * n, -math.inf)
            for n in range(min(count, seen - window + 1 - begin)):
                store_element(float32_tag, row + 4 * n, -math.inf)
            softmax_row(row, chunks, maximum + 4 * r, total + 4 * r, alpha + 4 * r)
        _weigh_values(tag, rows, head_dim, values, count, scores, alpha, sums)
        begin = stop
        keys += ahead
        values += ahead
        ahead = -ahead

    target = field(job, fields.OUT) + first_token * field(job, fields.OUT_TOKEN)
    target += head * group * field(job, fields.OUT_HEAD)
    for r in range(rows):
        token, member = divmod(r, group)
        at = target + token * field(job, fields.OUT_TOKEN)
        at += member * field(job, fields.OUT_HEAD)
        share = types.float32(1 / load_element(float32_tag, total + 4 * r))
        for d in range(0, head_dim, 16):
            from_at, to_at = sums + r * wide + 4 * d, at + d * item_bytes(tag)
            scale_chunk(float32_tag, tag, from_at, share, to_at)


@njit
def _score_tile_rows(tag, rows, chunks, keys, count, query, scores, next_keys, next_values):
    """scores [rows, KV_TILE] = query @ keys, in register blocks of rows; the usual D unrolled."""
    if chunks == 4:
        _score_blocks(tag, 4, rows, chunks, keys, count, query, scores, next_keys, next_values)
    elif chunks == 8:
        _score_blocks(tag, 8, rows, chunks, keys, count, query, scores, next_keys, next_values)
    else:
        _score_blocks(tag, 0, rows, chunks, keys, count, query, scores, next_keys, next_values)


@njit
def _score_blocks(tag, unrolled, rows, chunks, keys, count, query, scores, next_keys, next_values):
    wide, step = 64 * chunks, 4 * fields.KV_TILE
    if rows >= 4:
        score_keys(
            tag, 4, unrolled, 1, keys, count, query, wide, chunks, scores, step,
            next_keys, next_values,
        )  # fmt: skip
        r = 4
    elif rows >= 2:
        score_keys(
            tag, 2, unrolled, 1, keys, count, query, wide, chunks, scores, step,
            next_keys, next_values,
        )  # fmt: skip
        r = 2
    else:
        score_keys(
            tag, 1, unrolled, 1, keys, count, query, wide, chunks, scores, step,
            next_keys, next_values,
        )  # fmt: skip
        r = 1
    while r + 4 <= rows:
        score_keys(
            tag, 4, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys, keys,
        )  # fmt: skip
        r += 4
    while r < rows:
        score_keys(
            tag, 1, unrolled, 0, keys, count, query + r * wide, wide, chunks, scores + r * step,
            step, keys, keys,
        )  # fmt: skip
        r += 1


@njit
def _weigh_values(tag, rows, head_dim, values, count, weights, alpha, sums):
    """sums[r] = sums[r] * alpha[r] + weights[r] @ values, in register blocks of rows x 64."""
    wide, step = 4 * head_dim, 4 * fields.KV_TILE
    d = 0
    while d < head_dim:
        at = d * item_bytes(tag)
        r = 0
        if d + 64 <= head_dim:
            while r + 4 <= rows:
                p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide + 4 * d
                value_rows(tag, 4, 4, values, at, count, p, step, a, o, wide)
                r += 4
            while r < rows:
                p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide + 4 * d
                value_rows(tag, 1, 4, values, at, count, p, step, a, o, wide)
                r += 1
            d += 64
        else:
            while r + 4 <= rows:
                p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide + 4 * d
                value_rows(tag, 4, 1, values, at, count, p, step, a, o, wide)
                r += 4
            while r < rows:
                p, a, o = weights + r * step, alpha + 4 * r, sums + r * wide + 4 * d
                value_rows(tag, 1, 1, values, at, count, p, step, a, o, wide)
                r += 1
            d += 16
