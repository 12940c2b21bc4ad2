"""Prefill tiles: CPU attention of many query rows, which are the lanes of vectors.

Elements of keys and values are broadcast, or pairs of bfloat16 (see prefill_bf16_dot). Three
functions differ between the two, and the inner loops, by the tag's type.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

import math

from numba import njit, types
from numba.extending import overload

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.kv_types_ir import convert_row, has_scales, is_widened
from kernels.cpu.attention.prefill_bf16_dot import join_pairs, load_pairs, store_pairs
from kernels.cpu.attention.softmax_ir import prefill_softmax, softcap_chunk
from kernels.cpu.attention.tile_ir import (
    elements_per_step,
    fill_chunk,
    prefill_scores,
    prefill_values,
    scale_chunk,
)
from kernels.cpu.attention.tile_keys import (
    LOG2_E,
    hide_keys,
    load_scales,
    locate_keys,
    row_address,
    score_scale,
)
from kernels.cpu.runtime.bf16_dot import is_bf16_dot_tag
from kernels.cpu.runtime.memory import (
    field,
    item_bytes,
    load_element,
    load_i64,
    store_element,
    store_i64,
)
from kernels.cpu.runtime.simd import float32_tag


@njit
def attend_prefill_tile(args, tag, kv, scratch, sequence, head, first_token, num_tokens, position):
    """Attend for the rows of one tile under one KV head.

    Row r is query token r // G and query head r % G of the KV head's group. Keys and values of the
    type ``kv`` that is narrower than the queries' are widened once for all rows.
    """
    group = field(args, fields.GROUP)
    head_dim = field(args, fields.HEAD_DIM)
    window = field(args, fields.WINDOW)
    scale = score_scale(args)
    softcap = load_element(float32_tag, args + 8 * fields.SOFTCAP)
    per_step = elements_per_step(tag)
    rows = num_tokens * group
    vectors = (rows + 15) // 16
    stride = 64 * vectors  # bytes of a row of R padded lanes
    keys = scratch
    values = keys + 16 * fields.KV_TILE
    scales = values + 16 * fields.KV_TILE  # [2, KV_TILE] float32, of keys and of values
    query = scales + 8 * fields.KV_TILE  # [D, R] float32, scaled, or [D / 2, R] pairs
    sums = query + head_dim * stride  # [D, R] float32
    scores = sums + head_dim * stride  # [KV_TILE, R] float32
    maximum = scores + fields.KV_TILE * stride  # [R]
    total = maximum + stride  # [R]
    alpha = total + stride  # [R]
    spare = alpha + stride  # KV_TILE / 2 * (R + D) numbers of 32 bits, [16, 16] at least
    wide = spare + 2 * fields.KV_TILE * (stride // 4 + head_dim)  # [2, KV_TILE, D], if widened

    token_bytes, head_bytes = field(args, fields.QUERY_TOKEN), field(args, fields.QUERY_HEAD)
    source = field(args, fields.QUERY) + first_token * token_bytes + head * group * head_bytes
    for r in range(16 * vectors):  # lanes beyond repeat the last row
        at = row_address(source, token_bytes, head_bytes, group, min(r, rows - 1))
        _load(tag, at, scale, head_dim, query + 4 * r, stride)
    for at in range(sums, scores, 64):
        fill_chunk(at, types.float32(0.0))
    for lanes in range(0, stride, 64):
        fill_chunk(maximum + lanes, types.float32(-math.inf))
        fill_chunk(total + lanes, types.float32(0.0))

    by_scale = scale if per_step == 2 else 1.0  # elements of queries are scaled already
    last = position + num_tokens - 1
    begin = max(0, position - window + 1)
    while begin <= last:
        stop = min(last + 1, (begin // fields.KV_TILE + 1) * fields.KV_TILE)
        count = stop - begin
        locate_keys(args, sequence, head, begin, stop, keys, values)
        if is_widened(tag, kv):
            _widen(tag, kv, keys, count, head_dim, wide)
            _widen(tag, kv, values, count, head_dim, wide + 4 * fields.KV_TILE * head_dim)
        _score_tile(tag, vectors, keys, count, query, head_dim // per_step, by_scale, scores)
        if has_scales(kv):
            load_scales(args, sequence, head, begin, stop, 16, scales)
            _multiply_keys(scores, count, vectors, scales + 4 * (begin % 16))
        if softcap != 0:
            for chunk in range(count * vectors):
                softcap_chunk(scores + 64 * chunk, softcap, LOG2_E)
        if stop - 1 > position or begin <= last - window:
            hide_keys(scores, stride, count, begin, rows, group, position, window)
        for vector in range(vectors):
            lanes = 64 * vector
            prefill_softmax(
                scores + lanes, begin, count, stride, maximum + lanes, total + lanes,
                alpha + lanes, spare,
            )  # fmt: skip
        if has_scales(kv):
            _multiply_keys(scores, count, vectors, scales + 4 * (fields.KV_TILE + begin % 16))
        steps, table, weights = _take(
            tag, begin, count, head_dim, stride, keys, values, scores, spare
        )
        value_bytes = per_step * item_bytes(tag)
        _weigh_tile(tag, vectors, head_dim, table, value_bytes, steps, weights, alpha, sums)
        begin = stop

    token_bytes, head_bytes = field(args, fields.OUT_TOKEN), field(args, fields.OUT_HEAD)
    target = field(args, fields.OUT) + first_token * token_bytes + head * group * head_bytes
    _store(tag, target, token_bytes, head_bytes, group, rows, head_dim, stride, sums, total, query)


@njit
def _widen(tag, kv, table, count, head_dim, wide):
    """Widen the rows of a table of addresses, and put the addresses of wide ones in their place."""
    for n in range(count):
        row = wide + 4 * n * head_dim
        convert_row(kv, tag, load_i64(table + 8 * n), head_dim // 16, row)
        store_i64(table + 8 * n, row)


@njit
def _multiply_keys(numbers, count, vectors, factors):
    """Multiply the rows of [count, R] by a factor each."""
    for n in range(count):
        factor = load_element(float32_tag, factors + 4 * n)
        for at in range(numbers + 64 * n * vectors, numbers + 64 * (n + 1) * vectors, 64):
            scale_chunk(float32_tag, float32_tag, at, factor, at)


def _load_elements(tag, source, scale, head_dim, lane, stride):
    """Store one row's query in its lane, scaled."""
    for d in range(head_dim):
        element = load_element(tag, source + d * item_bytes(tag))
        store_element(float32_tag, lane + d * stride, element * scale)


def _take_elements(tag, begin, count, head_dim, stride, keys, values, scores, spare):
    """Values where they are in the cache, and weights where the scores were."""
    return count, values, scores


def _store_elements(
    tag, target, token_bytes, head_bytes, group, rows, head_dim, stride, sums, total, query
):
    """Store sums divided by totals, rounded."""
    for r in range(rows):
        at = row_address(target, token_bytes, head_bytes, group, r)
        share = 1 / load_element(float32_tag, total + 4 * r)
        for d in range(head_dim):
            element = load_element(float32_tag, sums + d * stride + 4 * r) * share
            store_element(tag, at + d * item_bytes(tag), element)


def _load(tag, source, scale, head_dim, lane, stride):
    """Store one row's query in its lane. Never called: numba puts one of two functions here."""
    raise NotImplementedError


def _take(tag, begin, count, head_dim, stride, keys, values, scores, spare):
    """Steps of a tile's values, the table of their addresses, and weights. Likewise replaced."""
    raise NotImplementedError


def _store(tag, target, token_bytes, head_bytes, group, rows, head_dim, stride, sums, total, query):
    """Store the outputs of all rows. Likewise replaced."""
    raise NotImplementedError


@overload(_load)
def _choose_load(tag, source, scale, head_dim, lane, stride):
    return load_pairs if is_bf16_dot_tag(tag) else _load_elements


@overload(_take)
def _choose_take(tag, begin, count, head_dim, stride, keys, values, scores, spare):
    return join_pairs if is_bf16_dot_tag(tag) else _take_elements


@overload(_store)
def _choose_store(
    tag, target, token_bytes, head_bytes, group, rows, head_dim, stride, sums, total, query
):
    return store_pairs if is_bf16_dot_tag(tag) else _store_elements


@njit
def _score_tile(tag, vectors, keys, count, query, steps, scale, scores):
    """scores = keys @ query * scale, in register blocks of 4 keys x 64 rows."""
    stride = 64 * vectors
    vector = 0
    while vector < vectors:
        q, s = query + 64 * vector, scores + 64 * vector
        if vector + 4 <= vectors:
            _score_lanes(tag, 4, keys, count, q, stride, steps, scale, s)
            vector += 4
        else:
            _score_lanes(tag, 1, keys, count, q, stride, steps, scale, s)
            vector += 1


@njit
def _score_lanes(tag, vectors, keys, count, query, stride, steps, scale, scores):
    """The same for so many vectors of rows."""
    n = 0
    while n + 4 <= count:
        k, s = keys + 8 * n, scores + n * stride
        prefill_scores(tag, 4, vectors, k, query, stride, steps, scale, s)
        n += 4
    while n < count:
        k, s = keys + 8 * n, scores + n * stride
        prefill_scores(tag, 1, vectors, k, query, stride, steps, scale, s)
        n += 1


@njit
def _weigh_tile(tag, vectors, head_dim, values, value_bytes, count, weights, alpha, sums):
    """sums = sums * alpha + values.T @ weights, in register blocks of 4 x 64; D divides by 16."""
    stride = 64 * vectors
    vector = 0
    while vector < vectors:
        lanes = 64 * vector
        p, a = weights + lanes, alpha + lanes
        if vector + 4 <= vectors:
            for d in range(0, head_dim, 4):
                o, at = sums + d * stride + lanes, d * value_bytes
                prefill_values(tag, 4, 4, values, at, count, p, stride, a, o)
            vector += 4
        else:
            for d in range(0, head_dim, 4):
                o, at = sums + d * stride + lanes, d * value_bytes
                prefill_values(tag, 4, 1, values, at, count, p, stride, a, o)
            vector += 1
