"""Online softmax in CPU attention, one tile of keys after the other, in LLVM IR (see simd).

Weights are summed by their positions modulo 16, and those sums in halves: decode tiles, with keys
in lanes, and prefill tiles, with keys one after the other, get the same total, bit for bit.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import is_bf16_dot_tag
from kernels.cpu.runtime.simd import LANES


@intrinsic
def decode_softmax(typingctx, tag, kv, scores, num_chunks, maximum, total, alpha, value_scales):
    """One online-softmax step over a row of scores [num_chunks * 16] at positions 16n and on.

    Weights, times the scales of values in eight bits [num_chunks * 16], replace scores: float32, or
    bf16 pairs, which take half the row. Updates the running
    maximum and total, and stores in ``alpha`` the factor of earlier sums.
    """

    def codegen(context, builder, signature, args):
        _, _, scores, num_chunks, maximum, total, alpha, value_scales = args
        tag, kv = signature.args[:2]
        kind = types.uint16 if is_bf16_dot_tag(tag) else types.float32
        step = LANES * simd.size_of(kind)
        reduce_max = builder.module.declare_intrinsic(
            "llvm.vector.reduce.fmax.v16f32", (), ir.FunctionType(simd.F32, (simd.VF32,))
        )

        def largest(chunk, state):
            at = simd.offset(builder, scores, chunk, simd.i64(LANES * 4))
            return [simd.larger(builder, simd.load(builder, at, simd.VF32, 4), state[0])]

        old = simd.splat(builder, simd.load(builder, maximum, simd.F32, 4))
        (new,) = simd.loop(builder, num_chunks, [old], largest)
        peak = builder.call(reduce_max, (new,))
        simd.store(builder, peak, maximum, 4)
        shift = simd.finite(builder, simd.splat(builder, peak))

        def weigh(chunk, state):
            at = simd.offset(builder, scores, chunk, simd.i64(LANES * 4))
            weight = simd.weigh_scores(builder, simd.load(builder, at, simd.VF32, 4), shift)
            sums = builder.fadd(state[0], weight)
            if kv == types.int8:
                at = simd.offset(builder, value_scales, chunk, simd.i64(LANES * 4))
                weight = builder.fmul(weight, simd.load(builder, at, simd.VF32, 4))
            at = simd.offset(builder, scores, chunk, simd.i64(step))
            simd.store_vector(builder, weight, at, kind)
            return [sums]

        (sums,) = simd.loop(builder, num_chunks, [simd.vector(0.0)], weigh)
        shrink = builder.extract_element(
            simd.weigh_scores(builder, old, shift), ir.Constant(simd.I32, 0)
        )
        before = simd.load(builder, total, simd.F32, 4)
        now = simd.multiply_add(builder, before, shrink, _sum_lanes(builder, sums))
        simd.store(builder, now, total, 4)
        simd.store(builder, shrink, alpha, 4)

    i64 = types.int64
    return types.void(tag, kv, *(i64,) * 6), codegen


def _sum_lanes(builder, sums):
    """The sum of sixteen lanes: the upper half is added to the lower one, again and again."""
    half = LANES // 2
    while half:
        lanes = [ir.Constant(simd.I32, (lane + half) % LANES) for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(simd.I32, LANES), lanes)
        sums = builder.fadd(sums, builder.shuffle_vector(sums, sums, mask))
        half //= 2
    return builder.extract_element(sums, ir.Constant(simd.I32, 0))


@intrinsic
def prefill_softmax(
    typingctx, scores, begin, count, stride, maximum, total, alpha, sums
):  # fmt: skip
    """One online-softmax step for sixteen rows, in lanes: scores [count, 16], in place.

    The first is at position ``begin``; ``sums`` [16, 16] float32 is scratch.
    """

    def codegen(context, builder, signature, args):
        scores, begin, count, stride, maximum, total, alpha, sums = args

        def largest(n, state):
            at = simd.offset(builder, scores, n, stride)
            return [simd.larger(builder, simd.load(builder, at, simd.VF32, 4), state[0])]

        old = simd.load(builder, maximum, simd.VF32, 4)
        (new,) = simd.loop(builder, count, [old], largest)
        simd.store(builder, new, maximum, 4)
        shift = simd.finite(builder, new)
        parts = [builder.add(sums, simd.i64(4 * LANES * part)) for part in range(LANES)]
        for part in parts:
            simd.store(builder, simd.vector(0.0), part, 4)

        def weigh(n, state):
            at = simd.offset(builder, scores, n, stride)
            weight = simd.weigh_scores(builder, simd.load(builder, at, simd.VF32, 4), shift)
            simd.store(builder, weight, at, 4)
            part = builder.and_(builder.add(begin, n), simd.i64(LANES - 1))
            part = simd.offset(builder, sums, part, simd.i64(4 * LANES))
            simd.store(
                builder, builder.fadd(simd.load(builder, part, simd.VF32, 4), weight), part, 4
            )
            return []

        simd.loop(builder, count, [], weigh)
        rest = [simd.load(builder, part, simd.VF32, 4) for part in parts]
        while len(rest) > 1:
            half = len(rest) // 2
            rest = [builder.fadd(rest[n], rest[n + half]) for n in range(half)]
        shrink = simd.weigh_scores(builder, old, shift)
        before = simd.load(builder, total, simd.VF32, 4)
        simd.store(builder, simd.multiply_add(builder, before, shrink, rest[0]), total, 4)
        simd.store(builder, shrink, alpha, 4)

    i64 = types.int64
    return types.void(*(i64,) * 8), codegen


@intrinsic
def softcap_chunk(typingctx, scores, cap, log2_scale):
    """score = log2_scale * cap * tanh(score / cap) for sixteen scores, in place."""

    def codegen(context, builder, signature, args):
        scores, cap, log2_scale = args
        inverse = simd.splat(builder, builder.fdiv(simd.f32(1.0), cap))
        x = builder.fmul(simd.load(builder, scores, simd.VF32, 4), inverse)
        bent = simd.tanh(builder, x)
        scale = simd.splat(builder, builder.fmul(cap, log2_scale))
        simd.store(builder, builder.fmul(bent, scale), scores, 4)

    return types.void(types.int64, types.float32, types.float32), codegen
