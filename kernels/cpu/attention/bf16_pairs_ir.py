"""Makes pairs of bfloat16 for CPU attention, in LLVM IR (see simd)."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import splat_bits
from kernels.cpu.runtime.simd import LANES


@intrinsic
def pair_shares(typingctx, low, high, total, out):
    """Divide two vectors of float32 by their totals and round them to sixteen bf16 pairs."""

    def codegen(context, builder, signature, args):
        low, high, total, out = args
        share = builder.fdiv(simd.vector(1.0), simd.load(builder, total, simd.VF32, 4))
        first, second = (
            simd.rounded_bits(
                builder, builder.fmul(simd.load(builder, address, simd.VF32, 4), share)
            )
            for address in (low, high)
        )
        second = builder.and_(second, simd.repeated(0xFFFF0000))
        simd.store(builder, builder.or_(builder.lshr(first, simd.repeated(16)), second), out, 4)

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def pair_weights(typingctx, low, high, keep_low, keep_high, out):
    """Round two vectors of float32 to sixteen bf16 pairs; a half that is not kept becomes 0.

    ``keep_low`` and ``keep_high`` are -1 to keep a half, else 0.
    """

    def codegen(context, builder, signature, args):
        low, high, keep_low, keep_high, out = args
        first = simd.rounded_bits(builder, simd.load(builder, low, simd.VF32, 4))
        second = simd.rounded_bits(builder, simd.load(builder, high, simd.VF32, 4))
        first = builder.and_(builder.lshr(first, simd.repeated(16)), _mask(builder, keep_low))
        second = builder.and_(
            builder.and_(second, simd.repeated(0xFFFF0000)), _mask(builder, keep_high)
        )
        simd.store(builder, builder.or_(first, second), out, 4)

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def pair_values(typingctx, kv, low, high, keep_low, keep_high, num_chunks, out):
    """Interleave two rows of bfloat16, or of int8, to one of pairs; a half not kept becomes 0.

    ``low`` and ``high`` are entries of an address table. ``keep_low`` and ``keep_high`` are -1 to
    keep a half, else 0. A row has ``num_chunks`` * 16 elements.
    """

    def codegen(context, builder, signature, args):
        low_at, high_at, keep_low, keep_high, num_chunks, out = args[1:]
        low = simd.load(builder, low_at, simd.I64, 8)
        high = simd.load(builder, high_at, simd.I64, 8)
        masks = _mask(builder, keep_low), _mask(builder, keep_high)

        def body(chunk, _):
            halves = []
            for row, mask in zip((low, high), masks, strict=True):
                at = simd.offset(builder, row, chunk, simd.i64(simd.size_of(kv) * LANES))
                numbers = builder.bitcast(simd.load_vector(builder, at, kv), simd.VI32)
                loaded = builder.lshr(numbers, simd.repeated(16))  # their digits all fit
                halves.append(builder.and_(loaded, mask))
            pairs = builder.or_(halves[0], builder.shl(halves[1], simd.repeated(16)))
            simd.store(builder, pairs, simd.offset(builder, out, chunk, simd.i64(4 * LANES)), 4)
            return []

        simd.loop(builder, num_chunks, [], body)

    return types.void(kv, *(types.int64,) * 6), codegen


def _mask(builder, keep):
    return splat_bits(builder, builder.trunc(keep, simd.I32))
