"""Vectors in LLVM IR: building blocks of the intrinsics that CPU kernels call.

numba has no vector type and no bfloat16, and LLVM does not reliably vectorise loops over raw
addresses. So the few inner loops are written in LLVM IR: sixteen float32 lanes (one AVX-512
register, or two of AVX2), bfloat16 widened while it is loaded, register blocks of rows x vectors.

The type of an *element tag*, a numpy scalar, is the type of elements in memory: ``float32`` for
float32, ``uint16`` for the bits of bfloat16 and ``int8`` for int8. All addresses are int64, all
strides are in bytes.
"""

import math

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

LANES = 16
float32_tag = np.float32(0)
bfloat16_tag = np.uint16(0)
int8_tag = np.int8(0)

F32 = ir.FloatType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF32 = ir.VectorType(F32, LANES)
VI8, VI16, VI32 = (ir.VectorType(each, LANES) for each in (I8, I16, I32))
_FUSE = ("contract",)  # let LLVM fuse a multiplication with the addition that uses it


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def f32(value: float) -> ir.Constant:
    return ir.Constant(F32, value)


def vector(value: float) -> ir.Constant:
    return ir.Constant(VF32, [f32(value)] * LANES)


def repeated(bits: int) -> ir.Constant:
    """The same 32 bits in every lane."""
    return ir.Constant(VI32, [ir.Constant(I32, bits)] * LANES)


def size_of(tag):
    """Bytes of an element."""
    return {types.float32: 4, types.int8: 1}.get(tag, 2)


def load(builder, address, what, align):
    return builder.load(builder.inttoptr(address, what.as_pointer()), align=align)


def store(builder, value, address, align):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def load_vector(builder, address, tag):
    """Sixteen elements as float32."""
    if tag == types.float32:
        return load(builder, address, VF32, 4)
    if tag == types.int8:
        return builder.sitofp(load(builder, address, VI8, 1), VF32)
    bits = builder.zext(load(builder, address, VI16, 2), VI32)
    return builder.bitcast(builder.shl(bits, repeated(16)), VF32)


def load_scalar(builder, address, tag):
    """One element as float32."""
    if tag == types.float32:
        return load(builder, address, F32, 4)
    bits = builder.zext(load(builder, address, I16, 2), I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)


def store_scalar(builder, value, address, tag):
    """Store a float32 as one element, rounded to the nearest, ties to even."""
    if tag == types.float32:
        store(builder, value, address, 4)
        return
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
    # Rounding could carry a NaN into infinity or zero.
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, ir.Constant(I32, 0x7FC00000), rounded)
    high = builder.trunc(builder.lshr(rounded, ir.Constant(I32, 16)), I16)
    store(builder, high, address, 2)


def store_vector(builder, value, address, tag):
    """Store sixteen float32 as elements, rounded to the nearest, ties to even."""
    if tag == types.float32:
        store(builder, value, address, 4)
        return
    high = builder.trunc(builder.lshr(rounded_bits(builder, value), repeated(16)), VI16)
    store(builder, high, address, 2)


def rounded_bits(builder, value):
    """The bits of sixteen float32, rounded to bfloat16 in the upper half: nearest, ties to even."""
    bits = builder.bitcast(value, VI32)

    odd = builder.and_(builder.lshr(bits, repeated(16)), repeated(1))
    rounded = builder.add(bits, builder.add(odd, repeated(0x7FFF)))
    # Rounding could carry a NaN into infinity or zero.
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, repeated(0x7FC00000), rounded)


def splat(builder, scalar):
    lane0 = builder.insert_element(ir.Constant(VF32, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = repeated(0)
    return builder.shuffle_vector(lane0, ir.Constant(VF32, ir.Undefined), mask)


def multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def offset(builder, address, index, stride):
    return builder.add(address, builder.mul(index, stride))


def reduce_add(builder, vector):
    reduce = builder.module.declare_intrinsic(
        "llvm.vector.reduce.fadd.v16f32", (), ir.FunctionType(F32, (F32, VF32))
    )
    return builder.call(reduce, (f32(-0.0), vector), fastmath=("reassoc",))


def lane_bits(builder, mask):
    """The lanes of a mask as bits of an int64."""
    return builder.zext(builder.bitcast(mask, I16), I64)


def larger(builder, a, b):
    """The maximum of each lane; ``b`` where ``a`` is NaN."""
    return builder.select(builder.fcmp_ordered("ogt", a, b), a, b)


def loop(builder, count, initial, body):
    """``for i in range(count): state = body(i, state)`` over a list of IR values."""
    before = builder.basic_block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(i64(0), before)
    state = []
    for value in initial:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        state.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    new_state = body(index, state)
    end = builder.basic_block
    index.add_incoming(builder.add(index, i64(1)), end)
    for phi, value in zip(state, new_state, strict=True):
        phi.add_incoming(value, end)
    builder.branch(head)
    builder.position_at_end(after)
    return state


def exp2(builder, x):
    """2**x per lane for x <= 0, relative error about 1e-7; a NaN stays one.

    Adding 1.5 * 2**23 rounds x to an integer n that then sits in the low bits of the sum, so that
    a shift puts it where a float keeps its exponent.
    """
    # Below 2**-125 the exponent would leave the normal range; nothing that small matters.
    x = builder.select(builder.fcmp_ordered("olt", x, vector(-125.0)), vector(-125.0), x)
    magic = vector(1.5 * 2**23)
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))  # [-0.5, 0.5]
    power = vector(math.log(2.0) ** 7 / math.factorial(7))
    for order in range(6, -1, -1):
        coefficient = vector(math.log(2.0) ** order / math.factorial(order))
        power = multiply_add(builder, power, fraction, coefficient)
    exponent = builder.shl(builder.bitcast(shifted, VI32), repeated(23))
    return builder.bitcast(builder.add(builder.bitcast(power, VI32), exponent), VF32)


def tanh(builder, x):
    """tanh per lane, relative error about 1e-7.

    Near zero Lambert's continued fraction, since a quotient of exponentials would cancel there.
    """
    zero, one = vector(0.0), vector(1.0)
    negative = builder.fcmp_ordered("olt", x, zero)
    magnitude = builder.select(negative, builder.fneg(x), x)
    square = builder.fmul(x, x)
    above = multiply_add(builder, square, builder.fadd(square, vector(105.0)), vector(945.0))
    below = multiply_add(builder, square, vector(15.0), vector(420.0))
    below = multiply_add(builder, square, below, vector(945.0))
    near = builder.fdiv(builder.fmul(x, above), below)
    # (1 - t) / (1 + t) with t = exp(-2|x|), which never overflows.
    t = exp2(builder, builder.fmul(magnitude, vector(-2.0 * math.log2(math.e))))
    far = builder.fdiv(builder.fsub(one, t), builder.fadd(one, t))
    far = builder.select(negative, builder.fneg(far), far)
    return builder.select(builder.fcmp_ordered("olt", magnitude, one), near, far)


def weigh_scores(builder, score, shift):
    """exp2(score - shift), exactly zero for the minus infinity of a masked score."""
    hidden = builder.fcmp_ordered("oeq", score, vector(-math.inf))
    weight = exp2(builder, builder.fsub(score, shift))
    return builder.select(hidden, vector(0.0), weight)


def finite(builder, maximum):
    """The maximum to subtract; zero for rows that have seen no key."""
    empty = builder.fcmp_ordered("oeq", maximum, vector(-math.inf))
    return builder.select(empty, vector(0.0), maximum)
