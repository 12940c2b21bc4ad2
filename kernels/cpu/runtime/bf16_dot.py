"""Pairs of bfloat16 and fours of bytes in 32 bits, and products of vectors of them.

An *operand tag* says how numbers are multiplied: ``float32_tag`` element by element, widened;
``pair_tag`` by pairs, with the instruction for it; ``emulated_pair_tag`` does the same without, so
that it can be tested anywhere. Likewise ``four_tag`` and ``emulated_four_tag`` for bytes, signed in
rows and unsigned in weights; their sums are int32, whatever the vectors are called that hold them.
"""

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.cpu.runtime import simd

pair_tag = np.uint32(0)
emulated_pair_tag = np.int32(0)
four_tag = np.uint8(0)
emulated_four_tag = np.int8(0)


def is_pair_tag(tag):
    """Whether a tag's type says that pairs are multiplied."""
    return tag in (types.uint32, types.int32)


def fma(builder, a, b, c):
    """a * b + c in one rounding, on every machine."""
    function = builder.module.declare_intrinsic(
        "llvm.fma.v16f32", (), ir.FunctionType(simd.VF32, (simd.VF32,) * 3)
    )
    return builder.call(function, (a, b, c))


def low_halves(builder, pairs):
    """The first of each pair of bfloat16, as float32."""
    return builder.bitcast(builder.shl(pairs, simd.repeated(16)), simd.VF32)


def high_halves(builder, pairs):
    """The second of each pair of bfloat16, as float32."""
    mask = simd.repeated(0xFFFF0000)
    return builder.bitcast(builder.and_(pairs, mask), simd.VF32)


def dot_pairs(builder, tag, sums, rows, weights):
    """sums + rows[0] * weights[0] + ... for vectors of pairs, or of fours, [16] int32."""
    if tag in (types.uint8, types.int8):
        dot_fours = _dot_fours if tag == types.uint8 else _emulated_dot_fours
        found = dot_fours(builder, builder.bitcast(sums, simd.VI32), rows, weights)
        return builder.bitcast(found, simd.VF32)
    if tag == types.int32:
        for half in (high_halves, low_halves):
            sums = fma(builder, half(builder, rows), half(builder, weights), sums)
        return sums
    # In this form LLVM knows it since version 9; later ones translate it to theirs.
    dot = builder.module.declare_intrinsic(
        "llvm.x86.avx512bf16.dpbf16ps.512",
        (),
        ir.FunctionType(simd.VF32, (simd.VF32, simd.VI32, simd.VI32)),
    )
    return builder.call(dot, (sums, rows, weights))


def _dot_fours(builder, sums, rows, weights):
    kind = ir.FunctionType(simd.VI32, (simd.VI32,) * 3)
    dot = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
    return builder.call(dot, (sums, weights, rows))


def _emulated_dot_fours(builder, sums, rows, weights):
    for place in range(0, 32, 8):
        weight = builder.lshr(weights, simd.repeated(place))
        weight = builder.and_(weight, simd.repeated(0xFF))
        signed = builder.ashr(builder.shl(rows, simd.repeated(24 - place)), simd.repeated(24))
        sums = builder.add(sums, builder.mul(weight, signed))
    return sums


def splat_bits(builder, scalar):
    """A pair, sixteen times."""
    undefined = ir.Constant(simd.VI32, ir.Undefined)
    lane0 = builder.insert_element(undefined, scalar, ir.Constant(simd.I32, 0))
    mask = simd.repeated(0)
    return builder.shuffle_vector(lane0, undefined, mask)
