"""The inner loops of ``sample_kernel`` in LLVM IR (see simd for why and how)."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import math

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import splat_bits
from kernels.cpu.runtime.simd import LANES
from kernels.cpu.sampling import sample_arguments as fields

# Constants of the Gumbel noise, see ``gpu_worker.sampling.gumbel``.
_TOKEN_STEP = 0x9E3779B1
_MIX = (0x85EBCA6B, 0xC2B2AE35)
# e^x is no less than (1 + x / 16)^16, which four squarings compute.
_SQUARINGS = 4
# Covers the rounding of that.
_MARGIN = 1.001


@intrinsic
def scale_chunk(typingctx, tag, source, temperature, target):
    """Divide sixteen elements by the temperature, as float32.

    Divided, as torch does: a product with the inverse would round differently.
    """

    def codegen(context, builder, signature, args):
        _, source, temperature, target = args
        found = simd.load_vector(builder, source, signature.args[0])
        scaled = builder.fdiv(found, simd.splat(builder, temperature))
        simd.store(builder, scaled, target, 4)

    return types.void(tag, types.int64, types.float32, types.int64), codegen


@intrinsic
def may_win(typingctx, scaled, first_token, record, threshold, key, more_key):
    """A bit for each of sixteen tokens: whether it reaches the threshold and may beat the record.

    A token's noise exceeds its lag behind the record if its uniform number is below about
    exp(-lag). The number is compared with a bound on that, which needs no logarithm.
    """

    def codegen(context, builder, signature, args):
        scaled, first_token, record, threshold, *keys = args
        values = simd.load(builder, scaled, simd.VF32, 4)
        uniform = _uniform(builder, first_token, keys)
        lag = builder.fsub(simd.splat(builder, record), values)
        lag = simd.larger(builder, lag, simd.vector(0.0))
        power = simd.multiply_add(builder, lag, simd.vector(2.0**-_SQUARINGS), simd.vector(1.0))
        for _ in range(_SQUARINGS):
            power = builder.fmul(power, power)
        beats = builder.fmul(uniform, power)
        beats = builder.fcmp_ordered("olt", beats, simd.vector(_MARGIN))
        reach = builder.fcmp_ordered("oge", values, simd.splat(builder, threshold))
        return simd.lane_bits(builder, builder.and_(beats, reach))

    f32, i64 = types.float32, types.int64
    return i64(i64, i64, f32, f32, types.uint32, types.uint32), codegen


@intrinsic
def uniform_of(typingctx, token, key, more_key):
    """The uniform number of a token."""

    def codegen(context, builder, signature, args):
        token, *keys = args
        return builder.extract_element(_uniform(builder, token, keys), ir.Constant(simd.I32, 0))

    return types.float32(types.int64, types.uint32, types.uint32), codegen


def _uniform(builder, first_token, keys):
    """The uniform numbers of sixteen tokens, see ``gpu_worker.sampling.gumbel``."""
    lanes = ir.Constant(simd.VI32, [ir.Constant(simd.I32, lane) for lane in range(LANES)])
    first = splat_bits(builder, builder.trunc(first_token, simd.I32))
    bits = builder.mul(builder.add(first, lanes), simd.repeated(_TOKEN_STEP))
    for key in keys:
        bits = builder.xor(bits, splat_bits(builder, key))
        for shift, factor in zip((16, 13), _MIX, strict=True):
            bits = builder.xor(bits, builder.lshr(bits, simd.repeated(shift)))
            bits = builder.mul(bits, simd.repeated(factor))
        bits = builder.xor(bits, builder.lshr(bits, simd.repeated(16)))
    # The sign bit is flipped, as torch's signed numbers are moved up by half their range.
    number = builder.fadd(builder.sitofp(bits, simd.VF32), simd.vector(2.0**31 + 0.5))
    number = builder.fmul(number, simd.vector(2.0**-32))
    number = simd.larger(builder, number, simd.vector(2.0**-33))
    most = simd.vector(1 - 2.0**-24)
    return builder.select(builder.fcmp_ordered("olt", number, most), number, most)


def _bins(builder, scaled, top):
    """Distances of sixteen tokens to the most likely one, and their bins."""
    values = simd.load(builder, scaled, simd.VF32, 4)
    distance = builder.fsub(simd.splat(builder, top), values)
    place = builder.fmul(distance, simd.vector(fields.BINS_PER_UNIT))
    last = fields.NUM_BINS - 1
    within = builder.fcmp_ordered("olt", place, simd.vector(float(last)))
    # NaNs, and what is too far, are in the last one.
    place = builder.select(within, place, simd.vector(float(last)))
    return distance, builder.fptosi(place, simd.VI32)


@intrinsic
def weigh_chunk(typingctx, scaled, top, bins, masses):
    """Of sixteen tokens, bins, int32, and exp(-distance to the most likely one), float32."""

    def codegen(context, builder, signature, args):
        scaled, top, bins_at, masses_at = args
        distance, bins = _bins(builder, scaled, top)
        power = builder.fmul(distance, simd.vector(-math.log2(math.e)))
        simd.store(builder, bins, bins_at, 4)
        simd.store(builder, simd.exp2(builder, power), masses_at, 4)

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen


@intrinsic
def in_bin(typingctx, scaled, top, index):
    """A bit for each of sixteen tokens: whether it is in a bin."""

    def codegen(context, builder, signature, args):
        scaled, top, index = args
        _, bins = _bins(builder, scaled, top)
        wanted = splat_bits(builder, builder.trunc(index, simd.I32))
        return simd.lane_bits(builder, builder.icmp_signed("==", bins, wanted))

    return types.int64(types.int64, types.float32, types.int64), codegen


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer, for numba's arrays."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen
