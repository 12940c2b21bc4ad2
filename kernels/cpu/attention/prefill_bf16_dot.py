"""The parts of a prefill tile that differ with dot products of bf16 pairs (see prefill_tile).

Pairs of elements of keys, and of the values of two neighbouring keys, are broadcast. Keys at
positions 2n and 2n + 1 are neighbours, so that a row's sums do not depend on where its prompt was
cut into chunks, nor on a window. Scores are float32; weights are rounded to bfloat16 as the values
are, their total is not. numba compiles these functions into prefill_tile.
"""

# ruff: noqa: ARG001 - both variants have the same parameters and need different ones

from numba import types

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.bf16_pairs_ir import pair_shares, pair_values, pair_weights
from kernels.cpu.attention.tile_keys import row_address
from kernels.cpu.runtime.memory import load_i32, store_i32, store_i64
from kernels.cpu.runtime.simd import bfloat16_tag


def load_pairs(tag, source, scale, head_dim, lane, stride):
    """Copy one row's query to its lane; scores are scaled instead."""
    for pair in range(head_dim // 2):
        store_i32(lane + pair * stride, load_i32(source + 4 * pair))


def join_pairs(tag, begin, count, head_dim, stride, keys, values, scores, spare):
    """Interleave values and weights of neighbours, at positions 2n and 2n + 1.

    A neighbour outside the tile has weight 0. The addresses of pairs replace those of keys.
    """
    weights = spare  # [KV_TILE / 2, R] pairs
    joined = weights + fields.KV_TILE // 2 * stride  # [KV_TILE / 2, D] pairs
    before = begin % 2
    num_pairs = (count + before + 1) // 2
    for pair in range(num_pairs):
        low, high = 2 * pair - before, 2 * pair - before + 1
        has_low, has_high = low >= 0, high < count
        low, high = (low if has_low else high), (high if has_high else low)
        keep_low, keep_high = -types.int64(has_low), -types.int64(has_high)
        first, second, out = scores + low * stride, scores + high * stride, weights + pair * stride
        for lanes in range(0, stride, 64):
            pair_weights(first + lanes, second + lanes, keep_low, keep_high, out + lanes)
        row = joined + 4 * pair * head_dim
        pair_values(
            bfloat16_tag,
            values + 8 * low,
            values + 8 * high,
            keep_low,
            keep_high,
            head_dim // 16,
            row,
        )
        store_i64(keys + 8 * pair, row)
    return num_pairs, keys, weights


def store_pairs(
    tag, target, token_bytes, head_bytes, group, rows, head_dim, stride, sums, total, query
):
    """Store sums divided by totals, rounded."""
    rounded = query  # queries are not read any more
    for pair in range(head_dim // 2):
        low = sums + 2 * pair * stride
        for lanes in range(0, stride, 64):
            at = rounded + pair * stride + lanes
            pair_shares(low + lanes, low + stride + lanes, total + lanes, at)
    for r in range(rows):
        at = row_address(target, token_bytes, head_bytes, group, r)
        for pair in range(head_dim // 2):
            store_i32(at + 4 * pair, load_i32(rounded + pair * stride + 4 * r))
