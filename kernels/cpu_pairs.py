"""Pairs of bfloat16 in 32 bits, and products of vectors of them.

An *operand tag* says how bfloat16 is multiplied: ``float32_tag`` element by element, widened;
``pair_tag`` by pairs, with the instruction for it; ``emulated_pair_tag`` does the same without, so
that it can be tested anywhere.
"""

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels import cpu_simd as simd

pair_tag = np.uint32(0)
emulated_pair_tag = np.int32(0)


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
    """sums + rows[0] * weights[0] + rows[1] * weights[1] for vectors of pairs [16] int32."""
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


def splat_bits(builder, scalar):
    """A pair, sixteen times."""
    undefined = ir.Constant(simd.VI32, ir.Undefined)
    lane0 = builder.insert_element(undefined, scalar, ir.Constant(simd.I32, 0))
    mask = simd.repeated(0)
    return builder.shuffle_vector(lane0, undefined, mask)
