"""Dot products of pairs of bfloat16 and of four bytes, lane by lane in 32 bits.

The type of an *operand tag* decides how numbers are multiplied: ``float32_tag`` one by one, in
float32; ``bf16_dot_tag`` as pairs of bfloat16, with the instruction for it;
``emulated_bf16_dot_tag`` the same without it, for tests on any CPU. ``amx_tag`` and
``emulated_amx_tag`` stand for pairs in tiles (see ``kernels.cpu.amx.tiles``). ``int8_dot_tag`` and
``emulated_int8_dot_tag`` stand for four bytes, signed in rows and unsigned in weights; their sums
are int32, held in vectors of float32.
"""

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.instruction_set import Dot

bf16_dot_tag = np.uint32(0)
emulated_bf16_dot_tag = np.int32(0)
int8_dot_tag = np.uint8(0)
emulated_int8_dot_tag = np.int8(0)
amx_tag = np.uint64(0)
emulated_amx_tag = np.int64(0)

BF16_DOT_TAGS = {
    Dot.NATIVE: bf16_dot_tag,
    Dot.EMULATED: emulated_bf16_dot_tag,
    Dot.AMX: amx_tag,
    Dot.EMULATED_AMX: emulated_amx_tag,
}
"""Of bfloat16 that is not widened."""


def is_bf16_dot_tag(tag):
    """Whether a tag's type stands for dot products of bf16 pairs."""
    return tag in (types.uint32, types.int32) or is_amx_tag(tag)


def is_amx_tag(tag):
    """Whether a tag's type stands for products by AMX tiles."""
    return tag in (types.uint64, types.int64)


def is_emulated_amx_tag(tag):
    """Whether those are emulated."""
    return tag == types.int64


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


def multiply_accumulate(builder, tag, sums, rows, weights):
    """sums + rows . weights in each lane; rows and weights are bf16 pairs or four bytes."""
    if tag in (types.uint8, types.int8):
        dot_fours = _dot_fours if tag == types.uint8 else _emulated_dot_fours
        found = dot_fours(builder, builder.bitcast(sums, simd.VI32), rows, weights)
        return builder.bitcast(found, simd.VF32)
    if tag == types.int32:
        for half in (high_halves, low_halves):
            sums = fma(builder, half(builder, rows), half(builder, weights), sums)
        return sums
    # LLVM 9 introduced this form of the intrinsic; later versions translate it to theirs.
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
    """The same 32 bits in every lane."""
    undefined = ir.Constant(simd.VI32, ir.Undefined)
    lane0 = builder.insert_element(undefined, scalar, ir.Constant(simd.I32, 0))
    mask = simd.repeated(0)
    return builder.shuffle_vector(lane0, undefined, mask)
