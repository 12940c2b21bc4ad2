"""What CPU attention of few rows does by pairs of bfloat16 (see decode_tile, prefill_bf16_dot).

Every sum has the terms and the order that it has in a tile of many rows, so that a row gets the
same bits in both. A score is one chain over all pairs of D: the lanes of its vector are keys, and
keys are turned over in registers. A value's lanes lie along D, and two neighbours are put together
as they are read. numba compiles these functions into decode_tile.
"""

# ruff: noqa: ARG001 - elements do not need all that pairs do, and the other way round

from numba import njit

from kernels.cpu.attention.decode_bf16_dot_ir import score_turned, turn_keys
from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import copy_bytes


def load_row_pairs(tag, source, scale, head_dim, target):
    """One row's query as it is; its scores are scaled."""
    copy_bytes(target, source, 2 * head_dim)


def score_pair_rows(tag, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """scores [rows, KV_TILE] = query @ keys * scale, some vectors of keys at a time.

    So many that they stay in the fastest cache, beside the rows that are brought in.
    """
    if head_dim == 64:
        _score_tile(tag, 4, 2, rows, head_dim, keys, count, query, scale, scores, next_keys, spare)
    elif head_dim == 128:
        _score_tile(tag, 2, 4, rows, head_dim, keys, count, query, scale, scores, next_keys, spare)
    else:
        _score_tile(tag, 2, 0, rows, head_dim, keys, count, query, scale, scores, next_keys, spare)


@njit
def _score_tile(
    tag, vectors, fetch, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
):
    """The same for so many vectors at a time; ``fetch`` is for rows of so many cache lines."""
    turned = (spare + 63) // 64 * 64  # [D / 2, vectors * 16] pairs
    n = 0
    while n + 16 * vectors <= (count + 15) // 16 * 16:
        k, s, coming = keys + 8 * n, scores + 4 * n, next_keys + 8 * n
        _score_vectors(tag, vectors, fetch, rows, head_dim, k, query, scale, s, coming, turned)
        n += 16 * vectors
    while n < count:
        k, s, coming = keys + 8 * n, scores + 4 * n, next_keys + 8 * n
        _score_vectors(tag, 1, 0, rows, head_dim, k, query, scale, s, coming, turned)
        n += 16


@njit
def _score_vectors(
    tag, vectors, fetch, rows, head_dim, keys, query, scale, scores, next_keys, turned
):
    """Turn keys over and multiply, in register blocks of rows."""
    wide, step, stride = 4 * head_dim, 4 * fields.KV_TILE, 64 * vectors
    turn_keys(fetch, keys, vectors, head_dim, turned, stride, next_keys)
    coming = next_keys + 64 * vectors  # the second half
    if rows >= 4:
        score_turned(
            tag, 4, vectors, fetch, turned, stride, head_dim, query, wide, scale, scores, step,
            coming,
        )  # fmt: skip
        r = 4
    else:
        score_turned(
            tag, 1, vectors, fetch, turned, stride, head_dim, query, wide, scale, scores, step,
            coming,
        )  # fmt: skip
        r = 1
    while r + 4 <= rows:
        q, s = query + r * wide, scores + r * step
        score_turned(tag, 4, vectors, 0, turned, stride, head_dim, q, wide, scale, s, step, coming)
        r += 4
    while r < rows:
        q, s = query + r * wide, scores + r * step
        score_turned(tag, 1, vectors, 0, turned, stride, head_dim, q, wide, scale, s, step, coming)
        r += 1
