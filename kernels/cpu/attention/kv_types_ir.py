"""Keys and values in other types than queries: stored narrower, and widened, in LLVM IR (see simd).

Widening is exact: bfloat16 has the digits for eight bits, and float32 for both.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import is_bf16_dot_tag
from kernels.cpu.runtime.prefetch import prefetch, read_once_cache
from kernels.cpu.runtime.simd import LANES
from kernels.interface import INT8_LEVELS

# Added to a number below 2^22 it leaves the nearest integer in the low bits, ties to even.
_ROUNDING = 1.5 * 2**23


def stored_type(tag):
    """The type of the elements that a tag stands for: bfloat16 in dot products of its pairs."""
    return types.uint16 if is_bf16_dot_tag(tag) else tag


@intrinsic
def is_widened(typingctx, tag, kv):
    """Whether keys and values of the type ``kv`` are narrower than what a tile multiplies."""

    def codegen(context, builder, signature, args):
        tag, kv = signature.args
        narrower = simd.size_of(kv) < simd.size_of(stored_type(tag))
        return ir.Constant(ir.IntType(1), narrower)

    return types.boolean(tag, kv), codegen


@intrinsic
def has_scales(typingctx, kv):
    """Whether keys and values of this type have a scale for each token."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(1), signature.args[0] == types.int8)

    return types.boolean(kv), codegen


@intrinsic
def convert_row(typingctx, from_tag, to_tag, source, num_chunks, target):
    """Store a row of ``num_chunks`` * 16 elements in another type, rounded if that is narrower."""

    def codegen(context, builder, signature, args):
        old, new = (stored_type(tag) for tag in signature.args[:2])
        _, _, source, num_chunks, target = args

        def convert(chunk, _):
            at = simd.offset(builder, source, chunk, simd.i64(LANES * simd.size_of(old)))
            found = simd.load_vector(builder, at, old)
            at = simd.offset(builder, target, chunk, simd.i64(LANES * simd.size_of(new)))
            if old == types.int8 and new == types.uint16:
                simd.store(builder, exact_halves(builder, found), at, 2)
            else:
                simd.store_vector(builder, found, at, new)
            return []

        simd.loop(builder, num_chunks, [], convert)

    return types.void(from_tag, to_tag, *(types.int64,) * 3), codegen


def exact_halves(builder, numbers):
    """The bits of float32 numbers as bfloat16, which has all their digits."""
    lanes = numbers.type.count
    wide, narrow = (ir.VectorType(kind, lanes) for kind in (simd.I32, simd.I16))
    shift = ir.Constant(wide, [ir.Constant(simd.I32, 16)] * lanes)
    return builder.trunc(builder.lshr(builder.bitcast(numbers, wide), shift), narrow)


def load_octets(builder, tag, address, num_pairs):
    """So many bf16 pairs, eight or sixteen, of int8 that follow each other."""
    kind = ir.VectorType(simd.I32, num_pairs)
    if tag != types.uint32 or num_pairs != LANES:
        octets = simd.load(builder, address, ir.VectorType(simd.I8, 2 * num_pairs), 1)
        numbers = builder.sitofp(octets, ir.VectorType(simd.F32, 2 * num_pairs))
        return builder.bitcast(exact_halves(builder, numbers), kind)
    low, high = (
        simd.load_vector(builder, builder.add(address, simd.i64(begin)), types.int8)
        for begin in (0, LANES)
    )
    halves = ir.VectorType(simd.I16, 2 * LANES)
    convert = builder.module.declare_intrinsic(
        "llvm.x86.avx512bf16.cvtne2ps2bf16.512",
        (),
        ir.FunctionType(halves, (simd.VF32, simd.VF32)),
    )
    return builder.bitcast(builder.call(convert, (high, low)), kind)


def exact_pairs(builder, low, high):
    """Sixteen bf16 pairs of two vectors of float32 numbers, whose digits all fit."""
    first = builder.lshr(builder.bitcast(low, simd.VI32), simd.repeated(16))
    return builder.or_(first, builder.bitcast(high, simd.VI32))


@intrinsic
def fetch_line(typingctx, address):
    """Prefetch a cache line of data that is read once."""

    def codegen(context, builder, signature, args):
        prefetch(builder, args[0], read_once_cache())

    return types.void(types.int64), codegen


@intrinsic
def quantize_row(typingctx, tag, source, num_chunks, target, scale_at):
    """Store a row of ``num_chunks`` * 16 elements as int8, and its scale as float32.

    The scale of a row with a NaN or an infinity is NaN.
    """

    def codegen(context, builder, signature, args):
        tag = signature.args[0]
        _, source, num_chunks, target, scale_at = args
        size = simd.i64(LANES * simd.size_of(tag))
        reduce_max = builder.module.declare_intrinsic(
            "llvm.vector.reduce.fmax.v16f32", (), ir.FunctionType(simd.F32, (simd.VF32,))
        )

        def measure(chunk, state):
            largest, nothing = state
            x = simd.load_vector(builder, simd.offset(builder, source, chunk, size), tag)
            bits = builder.and_(builder.bitcast(x, simd.VI32), simd.repeated(0x7FFFFFFF))
            magnitude = builder.bitcast(bits, simd.VF32)
            nothing = simd.multiply_add(builder, x, simd.vector(0.0), nothing)
            return [simd.larger(builder, magnitude, largest), nothing]

        zero = simd.vector(0.0)
        largest, nothing = simd.loop(builder, num_chunks, [zero, zero], measure)
        peak = builder.fadd(builder.call(reduce_max, (largest,)), simd.reduce_add(builder, nothing))
        scale = builder.fdiv(peak, simd.f32(INT8_LEVELS))
        simd.store(builder, scale, scale_at, 4)
        # A row of zeros may be divided by any number. A quotient is the same on every machine.
        some = builder.fcmp_ordered("ogt", scale, simd.f32(0.0))
        divisor = simd.splat(builder, builder.select(some, scale, simd.f32(1.0)))

        def store(chunk, _):
            x = simd.load_vector(builder, simd.offset(builder, source, chunk, size), tag)
            steps = builder.fadd(builder.fdiv(x, divisor), simd.vector(_ROUNDING))
            octets = builder.trunc(builder.bitcast(steps, simd.VI32), simd.VI8)
            simd.store(builder, octets, simd.offset(builder, target, chunk, simd.i64(LANES)), 1)
            return []

        simd.loop(builder, num_chunks, [], store)

    return types.void(tag, *(types.int64,) * 4), codegen
