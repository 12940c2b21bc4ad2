"""AMX without AMX: the reference of the tile instructions in LLVM IR, for tests on any CPU.

A tile is 16 x 64 bytes of a thread's own memory, behind the configuration, which is laid out as
LDTILECFG reads it. Rounding is that of TDPBF16PS, whose definition in Intel's manual (volume 2C)
is followed step by step, but numbers below 2**-126 are not flushed to zero.
"""

import math

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import fma, high_halves, low_halves, splat_bits

_ROW_BYTES = 64
_TILE_BYTES = 16 * _ROW_BYTES
_CONFIG_BYTES = 64
_CONFIG_ROWS = 48  # a byte for each tile
_PAIRS = 16  # of inputs
STATE_BYTES = _CONFIG_BYTES + 8 * _TILE_BYTES


def release(builder, state):
    """TILERELEASE: no tile has rows."""
    rows = builder.add(state, simd.i64(_CONFIG_ROWS))
    simd.store(builder, simd.i64(0), rows, 8)


def clear(builder, state, tile):
    """TILEZERO."""
    for row in range(16):
        simd.store(builder, simd.vector(0.0), _row(builder, state, tile, simd.i64(row)), 4)


def load(builder, state, tile, address, stride):
    """TILELOADD: rows beyond the configured ones become zero."""
    clear(builder, state, tile)

    def copy_row(row, _):
        found = simd.load(builder, simd.offset(builder, address, row, stride), simd.VF32, 1)
        simd.store(builder, found, _row(builder, state, tile, row), 4)
        return []

    simd.loop(builder, _num_rows(builder, state, tile), [], copy_row)


def store(builder, state, tile, address, stride):
    """TILESTORED."""

    def copy_row(row, _):
        found = simd.load(builder, _row(builder, state, tile, row), simd.VF32, 4)
        simd.store(builder, found, simd.offset(builder, address, row, stride), 1)
        return []

    simd.loop(builder, _num_rows(builder, state, tile), [], copy_row)


def multiply(builder, state, sums, rows, weights):
    """TDPBF16PS; sums become NaN where the instruction would fault, for rows that do not fit."""
    num_rows = _num_rows(builder, state, sums)
    same = builder.icmp_signed("==", num_rows, _num_rows(builder, state, rows))
    whole = builder.icmp_signed("==", _num_rows(builder, state, weights), simd.i64(_PAIRS))
    fits = builder.and_(same, whole)

    def add_row(row, _):
        x = _row(builder, state, rows, row)

        def add_pair(pair, halves):
            at = simd.offset(builder, x, pair, simd.i64(4))
            x_pair = splat_bits(builder, simd.load(builder, at, simd.I32, 4))
            w_pairs = simd.load(builder, _row(builder, state, weights, pair), simd.VI32, 4)
            return [
                fma(builder, half(builder, x_pair), half(builder, w_pairs), total)
                for half, total in zip((low_halves, high_halves), halves, strict=True)
            ]

        zeros = [simd.vector(0.0)] * 2
        even, odd = simd.loop(builder, simd.i64(_PAIRS), zeros, add_pair)
        at = _row(builder, state, sums, row)
        total = builder.fadd(simd.load(builder, at, simd.VF32, 4), builder.fadd(even, odd))
        simd.store(builder, builder.select(fits, total, simd.vector(math.nan)), at, 4)
        return []

    simd.loop(builder, num_rows, [], add_row)


def _row(builder, state, tile, row):
    """Address of a tile's row."""
    first = builder.add(state, simd.i64(_CONFIG_BYTES + tile * _TILE_BYTES))
    return simd.offset(builder, first, row, simd.i64(_ROW_BYTES))


def _num_rows(builder, state, tile):
    """Rows of a tile by the configuration."""
    at = builder.add(state, simd.i64(_CONFIG_ROWS + tile))
    return builder.zext(simd.load(builder, at, ir.IntType(8), 1), simd.I64)
