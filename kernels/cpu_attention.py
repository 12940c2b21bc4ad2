"""The CPU kernel of paged attention: tiles of query rows claimed by threads.

Threads enter the kernel at the same time; each claims tasks from the job's counter until none is
left. A task is one tile of query tokens of one sequence under one KV head, so keys and values are
read once for the whole group of query heads; or, where there are few rows, under several KV heads.
"""

import math

from numba import njit, types

from kernels import cpu_jobs as fields
from kernels.cpu_columns import attend_columns
from kernels.cpu_keys import LOG2_E, locate_keys, row_address
from kernels.cpu_memory import claim, field, item_bytes, load_element, load_i32, store_element
from kernels.cpu_simd import float32_tag
from kernels.cpu_tiles import (
    fill_chunk,
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
    group = field(job, fields.GROUP)
    tile_tokens = field(job, fields.TILE_TOKENS)
    lens = field(job, fields.CONTEXT_LENS)  # [S] int32
    starts = field(job, fields.QUERY_STARTS)  # [S + 1] int32
    column_rows = field(job, fields.COLUMN_ROWS)
    thread = claim(job + 8 * fields.NEXT_THREAD)
    scratch = field(job, fields.SCRATCH) + thread * field(job, fields.SCRATCH_BYTES)
    # Heads of a task with few rows, as long as there are enough tasks.
    most_heads = min(num_kv_heads, num_seqs * num_kv_heads // field(job, fields.FEWEST_TASKS))
    # Tasks are numbered sequence by sequence; a thread's claims only grow, so it walks along.
    sequence = -1
    tasks_before, tasks_here = 0, 0
    heads, parts = 1, 1
    while True:
        task = claim(job + 8 * fields.NEXT_TASK)
        while task >= tasks_before + tasks_here:
            tasks_before += tasks_here
            sequence += 1
            if sequence >= num_seqs:
                return
            rows = load_i32(starts + 4 * sequence + 4) - load_i32(starts + 4 * sequence)
            heads = 1
            if rows * group < column_rows:
                heads = max(1, min(most_heads, fields.MAX_TILE_ROWS // max(1, rows * group)))
            parts = (num_kv_heads + heads - 1) // heads
            tasks_here = (rows + tile_tokens - 1) // tile_tokens * parts
            if load_i32(lens + 4 * sequence) <= 0:
                tasks_here = 0
        tile, part = divmod(task - tasks_before, parts)
        head = part * heads
        first = tile * tile_tokens
        start = load_i32(starts + 4 * sequence)
        num_rows = load_i32(starts + 4 * sequence + 4) - start
        num_tokens = min(tile_tokens, num_rows - first)
        position = load_i32(lens + 4 * sequence) - num_rows + first
        if num_tokens * group < column_rows:
            num_heads = min(heads, num_kv_heads - head)
            _attend_rows(
                job, tag, scratch, sequence, head, num_heads, start + first, num_tokens, position
            )
        else:
            attend_columns(
                job, column_tag, scratch, sequence, head, start + first, num_tokens, position
            )


@njit
def _attend_rows(
    job, tag, scratch, sequence, first_head, num_heads, first_token, num_tokens, position
):
    """A tile of few rows, as in decode: the lanes of a vector lie along D.

    Row r of a KV head is query token r // G and query head r % G of its group. Heads take turns
    with every tile of keys, since those of a block lie side by side in memory.
    """
    group = field(job, fields.GROUP)
    head_dim = field(job, fields.HEAD_DIM)
    window = field(job, fields.WINDOW)
    rows = num_tokens * group
    wide = 4 * head_dim
    keys = scratch  # this turn's addresses; the next turn's lie behind them
    values = keys + 16 * fields.KV_TILE
    query = values + 16 * fields.KV_TILE  # [heads, R, D] float32, scaled
    sums = query + num_heads * rows * wide  # [heads, R, D] float32
    scores = sums + num_heads * rows * wide  # [R, KV_TILE] float32, of one head
    alpha = scores + rows * 4 * fields.KV_TILE  # [R], of one head
    maximum = alpha + 4 * rows  # [heads, R]
    total = maximum + 4 * num_heads * rows  # [heads, R]
    all_rows = num_heads * rows
    _load_rows(job, tag, first_head, first_token, rows, all_rows, query, sums, maximum, total)

    begin = max(0, position - window + 1)
    end = position + num_tokens
    ahead = 8 * fields.KV_TILE
    stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
    locate_keys(job, sequence, first_head, begin, stop, keys, values)
    while begin < end:
        stop = min(end, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        count = stop - begin
        for head in range(num_heads):
            # Blocks lie anywhere, so the hardware cannot foresee where the next turn's are. Where a
            # table ends are older addresses: to bring those in costs nothing.
            coming, next_keys, next_values = ahead, keys + ahead, values + ahead
            if head + 1 < num_heads:
                behind = first_head + head + 1
                locate_keys(job, sequence, behind, begin, stop, next_keys, next_values)
            elif stop < end:
                following = min(end, stop + fields.KV_TILE)
                locate_keys(job, sequence, first_head, stop, following, next_keys, next_values)
            else:
                coming = 0
            row = head * rows
            _score_tile_rows(
                tag, rows, head_dim // 16, keys, count, query + row * wide, scores, keys + coming
            )
            _weigh_scores(
                job, rows, begin, count, position, scores, maximum + 4 * row, total + 4 * row, alpha
            )
            _weigh_values(
                tag, rows, head_dim, values, count, scores, alpha, sums + row * wide,
                values + coming,
            )  # fmt: skip
            keys, values, ahead = next_keys, next_values, -ahead
        begin = stop

    _store_rows(job, tag, first_head, first_token, rows, all_rows, sums, total)


@njit
def _load_rows(job, tag, first_head, first_token, rows, all_rows, query, sums, maximum, total):
    """Queries in float32, scaled; nothing is summed up yet."""
    group, head_dim = field(job, fields.GROUP), field(job, fields.HEAD_DIM)
    token_bytes, head_bytes = field(job, fields.QUERY_TOKEN), field(job, fields.QUERY_HEAD)
    scale = load_element(float32_tag, job + 8 * fields.SCALE)
    if load_element(float32_tag, job + 8 * fields.SOFTCAP) == 0:
        scale *= LOG2_E
    source = field(job, fields.QUERY) + first_token * token_bytes
    for row in range(all_rows):
        head = first_head + row // rows
        at = source + head * group * head_bytes
        at = row_address(at, token_bytes, head_bytes, group, row % rows)
        for d in range(0, head_dim, 16):
            place = 4 * (row * head_dim + d)
            scale_chunk(tag, float32_tag, at + d * item_bytes(tag), scale, query + place)
            fill_chunk(sums + place, types.float32(0.0))
        store_element(float32_tag, maximum + 4 * row, -math.inf)
        store_element(float32_tag, total + 4 * row, 0.0)


@njit
def _weigh_scores(job, rows, begin, count, position, scores, maximum, total, alpha):
    """Scores of one head [R, KV_TILE] become weights; rows do not see later keys."""
    group, window = field(job, fields.GROUP), field(job, fields.WINDOW)
    softcap = load_element(float32_tag, job + 8 * fields.SOFTCAP)
    chunks = (count + 15) // 16
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


@njit
def _score_tile_rows(tag, rows, chunks, keys, count, query, scores, next_keys):
    """scores [rows, KV_TILE] = query @ keys, in register blocks of rows; the usual D unrolled."""
    if chunks == 4:
        _score_blocks(tag, 4, rows, chunks, keys, count, query, scores, next_keys)
    elif chunks == 8:
        _score_blocks(tag, 8, rows, chunks, keys, count, query, scores, next_keys)
    else:
        _score_blocks(tag, 0, rows, chunks, keys, count, query, scores, next_keys)


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
    wide, step = 4 * head_dim, 4 * fields.KV_TILE
    d = 0
    while d < head_dim:
        at, o = d * item_bytes(tag), sums + 4 * d
        if d + 64 <= head_dim:
            _weigh_columns(
                tag, 4, rows, values, at, count, weights, step, alpha, o, wide, next_values
            )
            d += 64
        else:
            _weigh_columns(
                tag, 1, rows, values, at, count, weights, step, alpha, o, wide, next_values
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
