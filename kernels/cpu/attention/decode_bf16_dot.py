"""The parts of a decode tile that differ with dot products of bf16 pairs (see decode_tile).

Every sum has the same terms in the same order as in a prefill tile (see prefill_bf16_dot), so that
a row has the same bits in both. A score is one chain over all pairs of D: lanes are keys, which are
transposed in registers. Lanes of values lie along D, and the values of two neighbouring keys are
interleaved as they are loaded. numba compiles these functions into decode_tile.
"""

# ruff: noqa: ARG001 - both variants have the same parameters and need different ones

from numba import njit

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.decode_bf16_dot_ir import score_transposed, transpose_keys
from kernels.cpu.runtime.memory import copy_bytes


def load_row_pairs(tag, source, scale, head_dim, target):
    """Copy one row's query; scores are scaled instead."""
    copy_bytes(target, source, 2 * head_dim)


def score_pair_rows(tag, kv, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """scores [rows, KV_TILE] = query @ keys * scale, some vectors of keys at a time.

    So many vectors that they stay in the L1 cache, beside the rows that are prefetched.
    """
    if head_dim == 64:
        _score_tile(
            tag, kv, 4, 2, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
        )
    elif head_dim == 128:
        _score_tile(
            tag, kv, 2, 4, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
        )
    else:
        _score_tile(
            tag, kv, 2, 0, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
        )


@njit
def _score_tile(
    tag, kv, vectors, fetch, rows, head_dim, keys, count, query, scale, scores, next_keys, spare
):
    """The same for so many vectors at a time; ``fetch``: the cache lines of a prefetched row."""
    transposed = (spare + 63) // 64 * 64  # [D / 2, vectors * 16] pairs
    n = 0
    while n + 16 * vectors <= (count + 15) // 16 * 16:
        k, s, coming = keys + 8 * n, scores + 4 * n, next_keys + 8 * n
        _score_vectors(
            tag, kv, vectors, fetch, rows, head_dim, k, query, scale, s, coming, transposed
        )
        n += 16 * vectors
    while n < count:
        k, s, coming = keys + 8 * n, scores + 4 * n, next_keys + 8 * n
        _score_vectors(tag, kv, 1, 0, rows, head_dim, k, query, scale, s, coming, transposed)
        n += 16


@njit
def _score_vectors(
    tag, kv, vectors, fetch, rows, head_dim, keys, query, scale, scores, next_keys, transposed
):
    """Transpose keys and multiply, in register blocks of rows."""
    wide, step, stride = 4 * head_dim, 4 * fields.KV_TILE, 64 * vectors
    transpose_keys(tag, kv, fetch, keys, vectors, head_dim, transposed, stride, next_keys)
    coming = next_keys + 64 * vectors  # the second half
    if rows >= 4:
        score_transposed(
            tag, kv, 4, vectors, fetch, transposed, stride, head_dim, query, wide, scale, scores,
            step, coming,
        )  # fmt: skip
        r = 4
    else:
        score_transposed(
            tag, kv, 1, vectors, fetch, transposed, stride, head_dim, query, wide, scale, scores,
            step, coming,
        )  # fmt: skip
        r = 1
    while r + 4 <= rows:
        q, s = query + r * wide, scores + r * step
        score_transposed(
            tag, kv, 4, vectors, 0, transposed, stride, head_dim, q, wide, scale, s, step, coming
        )
        r += 4
    while r < rows:
        q, s = query + r * wide, scores + r * step
        score_transposed(
            tag, kv, 1, vectors, 0, transposed, stride, head_dim, q, wide, scale, s, step, coming
        )
        r += 1
