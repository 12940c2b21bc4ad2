"""Attention of many query rows in bfloat16 on CPUs, by products of pairs.

The lanes of a vector are rows; pairs of elements of keys, and of the values of two neighbouring
keys, are broadcast. Which keys are neighbours depends on their positions alone, so that a row's
sums do not depend on where its prompt was cut into chunks, nor on a window. Scores are float32;
weights are rounded to bfloat16 as the values are, their total is not.
"""

import math

from numba import njit, types

from kernels import cpu_jobs as fields
from kernels.cpu_keys import LOG2_E, hide_keys, locate_keys
from kernels.cpu_memory import field, load_element, load_i32, store_i32
from kernels.cpu_pair_tiles import (
    fill_chunk,
    pair_shares,
    pair_values,
    pair_weights,
    score_pairs,
    value_pairs,
)
from kernels.cpu_simd import float32_tag
from kernels.cpu_tiles import softcap_chunk, softmax_columns


@njit
def attend_pairs(operand_tag, job, scratch, sequence, head, first_token, num_tokens, position):
    """A tile of many rows; row r is query token r // G and query head r % G of the group."""
    group = field(job, fields.GROUP)
    head_dim = field(job, fields.HEAD_DIM)
    window = field(job, fields.WINDOW)
    scale = load_element(float32_tag, job + 8 * fields.SCALE)
    softcap = load_element(float32_tag, job + 8 * fields.SOFTCAP)
    if softcap == 0:
        scale *= types.float32(LOG2_E)
    rows = num_tokens * group
    vectors = (rows + 15) // 16
    stride = 64 * vectors  # bytes of a row of R padded lanes
    keys = scratch
    values = keys + 16 * fields.KV_TILE
    query = values + 16 * fields.KV_TILE  # [D / 2, R] pairs
    sums = query + head_dim // 2 * stride  # [D, R] float32
    scores = sums + head_dim * stride  # [KV_TILE, R] float32
    weights = scores + fields.KV_TILE * stride  # [KV_TILE / 2, R] pairs
    neighbours = weights + fields.KV_TILE // 2 * stride  # [KV_TILE / 2, D] pairs of values
    maximum = neighbours + 4 * fields.KV_TILE // 2 * head_dim  # [R]
    total = maximum + stride  # [R]
    alpha = total + stride  # [R]

    source = field(job, fields.QUERY) + first_token * field(job, fields.QUERY_TOKEN)
    source += head * group * field(job, fields.QUERY_HEAD)
    for r in range(16 * vectors):
        token, member = divmod(min(r, rows - 1), group)  # lanes beyond repeat the last row
        at = source + token * field(job, fields.QUERY_TOKEN)
        at += member * field(job, fields.QUERY_HEAD)
        for pair in range(head_dim // 2):
            store_i32(query + pair * stride + 4 * r, load_i32(at + 4 * pair))
    for at in range(sums, sums + head_dim * stride, 64):
        fill_chunk(at, types.float32(0.0))
    for lanes in range(0, stride, 64):
        fill_chunk(maximum + lanes, types.float32(-math.inf))
        fill_chunk(total + lanes, types.float32(0.0))

    last = position + num_tokens - 1
    begin = max(0, position - window + 1)
    while begin <= last:
        stop = min(last + 1, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        count = stop - begin
        locate_keys(job, sequence, head, begin, stop, keys, values)
        _score_tile(operand_tag, vectors, keys, count, query, head_dim, scale, scores)
        if softcap != 0:
            for chunk in range(count * vectors):
                softcap_chunk(scores + 64 * chunk, softcap, LOG2_E)
        if stop - 1 > position or begin <= last - window:
            hide_keys(scores, stride, count, begin, rows, group, position, window)
        for vector in range(vectors):
            lanes = 64 * vector
            softmax_columns(
                scores + lanes, count, stride, maximum + lanes, total + lanes, alpha + lanes
            )
        # Positions 2n and 2n + 1 are neighbours; those outside the tile weigh nothing.
        before = begin % 2
        pairs = (count + before + 1) // 2
        for pair in range(pairs):
            low, high = 2 * pair - before, 2 * pair - before + 1
            has_low, has_high = low >= 0, high < count
            low, high = (low if has_low else high), (high if has_high else low)
            for vector in range(vectors):
                lanes = 64 * vector
                pair_weights(
                    scores + low * stride + lanes, scores + high * stride + lanes,
                    -types.int64(has_low), -types.int64(has_high), weights + pair * stride + lanes,
                )  # fmt: skip
            pair_values(
                values + 8 * low, values + 8 * high, -types.int64(has_low),
                -types.int64(has_high), head_dim // 16, neighbours + 4 * pair * head_dim,
            )  # fmt: skip
        _weigh_tile(operand_tag, vectors, head_dim, neighbours, pairs, weights, alpha, sums)
        begin = stop

    rounded = query  # nobody asks for queries any more
    for pair in range(head_dim // 2):
        low = sums + 2 * pair * stride
        for lanes in range(0, stride, 64):
            at = rounded + pair * stride + lanes
            pair_shares(low + lanes, low + stride + lanes, total + lanes, at)
    target = field(job, fields.OUT) + first_token * field(job, fields.OUT_TOKEN)
    target += head * group * field(job, fields.OUT_HEAD)
    for r in range(rows):
        token, member = divmod(r, group)
        at = target + token * field(job, fields.OUT_TOKEN)
        at += member * field(job, fields.OUT_HEAD)
        for pair in range(head_dim // 2):
            store_i32(at + 4 * pair, load_i32(rounded + pair * stride + 4 * r))


@njit
def _score_tile(operand_tag, vectors, keys, count, query, head_dim, scale, scores):
    """scores = keys @ query * scale, in register blocks of 4 keys x 64 rows."""
    stride, pairs = 64 * vectors, head_dim // 2
    vector = 0
    while vector < vectors:
        q, s = query + 64 * vector, scores + 64 * vector
        n = 0
        if vector + 4 <= vectors:
            while n + 4 <= count:
                k, o = keys + 8 * n, s + n * stride
                score_pairs(operand_tag, 4, 4, k, q, stride, pairs, scale, o)
                n += 4
            while n < count:
                k, o = keys + 8 * n, s + n * stride
                score_pairs(operand_tag, 1, 4, k, q, stride, pairs, scale, o)
                n += 1
            vector += 4
        else:
            while n + 4 <= count:
                k, o = keys + 8 * n, s + n * stride
                score_pairs(operand_tag, 4, 1, k, q, stride, pairs, scale, o)
                n += 4
            while n < count:
                k, o = keys + 8 * n, s + n * stride
                score_pairs(operand_tag, 1, 1, k, q, stride, pairs, scale, o)
                n += 1
            vector += 1


@njit
def _weigh_tile(operand_tag, vectors, head_dim, neighbours, pairs, weights, alpha, sums):
    """sums = sums * alpha + values.T @ weights, in register blocks of 4 x 64; D divides by 16."""
    stride, row = 64 * vectors, 4 * head_dim
    vector = 0
    while vector < vectors:
        lanes = 64 * vector
        p, a = weights + lanes, alpha + lanes
        if vector + 4 <= vectors:
            for d in range(0, head_dim, 4):
                v, o = neighbours + 4 * d, sums + d * stride + lanes
                value_pairs(operand_tag, 4, 4, v, row, pairs, p, stride, a, o)
            vector += 4
        else:
            for d in range(0, head_dim, 4):
                v, o = neighbours + 4 * d, sums + d * stride + lanes
                value_pairs(operand_tag, 4, 1, v, row, pairs, p, stride, a, o)
            vector += 1
