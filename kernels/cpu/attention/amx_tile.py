"""The parts of an attention tile that differ with AMX (see decode_tile).

Few query rows and many are computed alike, as a decode tile is. Keys are transposed to pairs, which
are the weights of a product; so are values, interleaved for two neighbouring keys. Queries, and
weights in bfloat16, are rows where they lie. Keys are summed 32 at a time, from a multiple of 32
on, so that a row's sums do not depend on where its prompt was cut into chunks. numba compiles these
functions into decode_tile.
"""

# ruff: noqa: ARG001 - all variants have the same parameters and need different ones

from numba import njit

from kernels.cpu.amx import blocks, tiles
from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.bf16_pairs_ir import pair_values
from kernels.cpu.attention.decode_bf16_dot_ir import transpose_keys
from kernels.cpu.attention.tile_ir import fetch_rows, scale_chunk
from kernels.cpu.runtime.memory import copy_bytes, fill_bytes, load_element
from kernels.cpu.runtime.simd import float32_tag

_PAIR_BYTES = 4
_SCORES_ROW = 4 * fields.KV_TILE


def begin_amx_tile(tag, rows, head_dim, spare):
    """Configure tiles for so many rows."""
    num_tiles, tile_rows = blocks.cut(rows)
    tiles.configure(tag, _state(spare, head_dim), tile_rows, min(num_tiles, 2))


def end_amx_tile(tag, head_dim, spare):
    """Release tiles."""
    tiles.release(tag, _state(spare, head_dim))


def load_amx_row(tag, source, scale, head_dim, target):
    """Copy one row's query, with zeros behind it; scores are scaled instead."""
    copy_bytes(target, source, 2 * head_dim)
    if head_dim % tiles.INPUTS != 0:
        fill_bytes(target + 2 * head_dim, 0, tiles.ROW_BYTES // 2)


def score_amx_rows(tag, kv, rows, head_dim, keys, count, query, scale, scores, next_keys, spare):
    """scores [rows, KV_TILE] = query @ keys * scale. Scores behind ``count`` are any numbers."""
    state, transposed = _state(spare, head_dim), _aligned(spare)  # [D / 2, KV_TILE] pairs
    chunks = (count + 15) // 16
    transpose_keys(tag, kv, 0, keys, chunks, head_dim, transposed, _SCORES_ROW, next_keys)
    if head_dim % tiles.INPUTS != 0:
        fill_bytes(transposed + head_dim // 2 * _SCORES_ROW, 0, 8 * _SCORES_ROW)
    _multiply_keys(tag, state, rows, head_dim, query, transposed, scores)
    for r in range(rows):
        for chunk in range(chunks):
            at = scores + r * _SCORES_ROW + 64 * chunk
            scale_chunk(float32_tag, float32_tag, at, scale, at)


@njit
def _multiply_keys(tag, state, rows, head_dim, query, transposed, scores):
    steps, wide = (head_dim + tiles.INPUTS - 1) // tiles.INPUTS, 4 * head_dim
    panel = blocks.PANEL_BYTES
    num_tiles, tile_rows = blocks.cut(rows)
    if num_tiles == 1:
        blocks.clear_sums(tag, state)
        blocks.add_one_tile(tag, state, steps, query, wide, transposed, _SCORES_ROW, panel)
        blocks.store_one_tile(tag, state, scores, _SCORES_ROW)
        return
    for tile in range(0, num_tiles, 2):
        r = tile * tile_rows
        second = min(r + tile_rows, rows - tile_rows)
        q, q_second = query + r * wide, query + second * wide
        for n in range(0, fields.KV_TILE // 16, 2):
            keys, out = transposed + n * panel, scores + n * panel
            blocks.clear_sums(tag, state)
            blocks.add_two_tiles(tag, state, steps, q, q_second, wide, keys, _SCORES_ROW, panel)
            blocks.store_two_tiles(
                tag, state, out + r * _SCORES_ROW, out + second * _SCORES_ROW, _SCORES_ROW
            )


def weigh_amx_values(
    tag, kv, rows, head_dim, values, count, weights, alpha, sums, next_values, spare
):
    """sums[r] = sums[r] * alpha[r] + weights[r] @ values, 32 keys at a time."""
    state, joined = _state(spare, head_dim), _aligned(spare)  # [KV_TILE / 2, D] pairs
    joined_row, chunks = _PAIR_BYTES * head_dim, head_dim // 16
    num_pairs = (count + 15) // 16 * 8  # values behind the last one repeat it, with weight zero
    for pair in range(num_pairs):
        at = values + 16 * pair
        pair_values(kv, at, at + 8, -1, -1, chunks, joined + pair * joined_row)
        fetch_rows(kv, next_values + 16 * pair, 2, chunks)
    steps = (num_pairs + tiles.ROWS - 1) // tiles.ROWS
    behind = steps * tiles.ROWS - num_pairs
    fill_bytes(joined + num_pairs * joined_row, 0, behind * joined_row)
    for r in range(rows):
        factor = load_element(float32_tag, alpha + 4 * r)
        for d in range(0, head_dim, 16):
            at = sums + 4 * (r * head_dim + d)
            scale_chunk(float32_tag, float32_tag, at, factor, at)
    num_tiles, tile_rows = blocks.cut(rows)
    for tile in range(0, num_tiles, 2):
        r = tile * tile_rows
        if num_tiles == 1:
            _add_values_of_one_tile(tag, state, steps, head_dim, weights, joined, sums)
        else:
            second = min(r + tile_rows, rows - tile_rows)
            _add_values_of_two_tiles(
                tag, state, steps, head_dim, weights + r * _SCORES_ROW,
                weights + second * _SCORES_ROW, joined, sums + 4 * r * head_dim,
                sums + 4 * second * head_dim,
            )  # fmt: skip


@njit
def _add_values_of_one_tile(tag, state, steps, head_dim, weights, joined, sums):
    """Add weighted values to the sums [R, D] of one tile of rows."""
    wide = 4 * head_dim
    for d in range(0, wide, blocks.PANEL_BYTES):
        tiles.load(tag, state, 0, sums + d, wide)
        for step in range(steps):
            tiles.load(tag, state, 4, weights + step * tiles.ROW_BYTES, _SCORES_ROW)
            tiles.load(tag, state, 6, joined + d + step * tiles.ROWS * wide, wide)
            tiles.multiply(tag, state, 0, 4, 6)
        tiles.store(tag, state, 0, sums + d, wide)


@njit
def _add_values_of_two_tiles(tag, state, steps, head_dim, weights, second, joined, sums, out):
    """The same for two tiles of rows, which may share rows: sums of both are loaded first."""
    wide = 4 * head_dim
    for d in range(0, wide, blocks.PANEL_BYTES):
        tiles.load(tag, state, 0, sums + d, wide)
        tiles.load(tag, state, 1, out + d, wide)
        for step in range(steps):
            tiles.load(tag, state, 6, joined + d + step * tiles.ROWS * wide, wide)
            tiles.load(tag, state, 4, weights + step * tiles.ROW_BYTES, _SCORES_ROW)
            tiles.multiply(tag, state, 0, 4, 6)
            tiles.load(tag, state, 5, second + step * tiles.ROW_BYTES, _SCORES_ROW)
            tiles.multiply(tag, state, 1, 5, 6)
        tiles.store(tag, state, 0, sums + d, wide)
        tiles.store(tag, state, 1, out + d, wide)


@njit
def _aligned(spare):
    return (spare + 63) // 64 * 64


@njit
def _state(spare, head_dim):
    """Address of the tiles' state, behind transposed keys and joined values."""
    return _aligned(spare) + 2 * fields.KV_TILE * (head_dim + tiles.INPUTS // 2)
