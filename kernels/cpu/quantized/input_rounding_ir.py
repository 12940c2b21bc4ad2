"""Rows of inputs rounded to eight bits, in LLVM IR.

A rounded row begins with three numbers for each group of inputs: their scale, the sum of the
rounded inputs (float32), and that of their integers times minus the zero point of unsigned codes
(int32), with which sums of products begin. Its integers follow, a byte each.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.quantized.quantized_ir import Tags
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.simd import LANES

GROUP_NUMBER_BYTES = 12
"""Of the numbers of a group of inputs in a rounded row."""

_VI8 = ir.VectorType(ir.IntType(8), LANES)
_MAGIC = 1.5 * 2**23  # added to a number, it rounds it, and its low bits are the integer


@intrinsic
def largest_input(typingctx, tag, x, count):
    """The largest magnitude of ``count`` elements, a multiple of sixteen; NaN for infinite ones."""

    def codegen(context, builder, signature, args):
        _, x, count = args
        tag = signature.args[0]
        kind = ir.FunctionType(simd.VF32, (simd.VF32,))
        fabs = builder.module.declare_intrinsic("llvm.fabs.v16f32", (), kind)
        stride = simd.i64(LANES * simd.size_of(tag))

        def body(chunk, state):
            largest, nothing = state
            found = simd.load_vector(builder, simd.offset(builder, x, chunk, stride), tag)
            largest = simd.larger(builder, builder.call(fabs, (found,)), largest)
            return [largest, builder.fadd(nothing, builder.fmul(found, simd.vector(0.0)))]

        count = builder.sdiv(count, simd.i64(LANES))
        initial = [simd.vector(0.0), simd.vector(0.0)]
        largest, nothing = simd.loop(builder, count, initial, body)
        reduce = builder.module.declare_intrinsic(
            "llvm.vector.reduce.fmax.v16f32", (), ir.FunctionType(simd.F32, (simd.VF32,))
        )
        largest = builder.call(reduce, (largest,))
        return builder.fadd(largest, simd.reduce_add(builder, nothing))

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def round_inputs(
    typingctx, tag, weight_tag, operand_tag, x, count, inverse, scale, numbers, target
):
    """Round ``count`` inputs that have one scale: x * ``inverse``.

    With an operand tag of bytes the group's numbers are written to ``numbers``, the integers to
    ``target``; with that of float32 ``target`` gets the integers times ``scale``.
    """

    def codegen(context, builder, signature, args):
        _, _, _, x, count, inverse, scale, numbers, target = args
        tag, tags, is_float = signature.args[0], Tags(*signature.args[1].types), False
        is_float = signature.args[2] == types.float32
        factor, magic = simd.splat(builder, inverse), simd.vector(_MAGIC)
        scales = simd.splat(builder, scale)
        stride = simd.i64(LANES * simd.size_of(tag))
        written = simd.i64(LANES * (4 if is_float else 1))

        def body(chunk, state):
            found = simd.load_vector(builder, simd.offset(builder, x, chunk, stride), tag)
            shifted = builder.fadd(builder.fmul(found, factor), magic)
            out = simd.offset(builder, target, chunk, written)
            if is_float:
                rounded = builder.fmul(builder.fsub(shifted, magic), scales)
                simd.store(builder, rounded, out, 4)
                return state
            bits = builder.bitcast(shifted, simd.VI32)
            whole = builder.sub(bits, builder.bitcast(magic, simd.VI32))
            simd.store(builder, builder.trunc(whole, _VI8), out, 4)
            return [builder.add(state[0], whole)]

        count = builder.sdiv(count, simd.i64(LANES))
        (sums,) = simd.loop(builder, count, [simd.repeated(0)], body)
        if is_float:
            return
        reduce = builder.module.declare_intrinsic(
            "llvm.vector.reduce.add.v16i32", (), ir.FunctionType(simd.I32, (simd.VI32,))
        )
        total = builder.call(reduce, (sums,))
        rounded = builder.fmul(builder.sitofp(total, simd.F32), scale)
        begin = builder.mul(total, ir.Constant(simd.I32, -tags.zero_point))
        for place, number in enumerate((scale, rounded, begin)):
            simd.store(builder, number, builder.add(numbers, simd.i64(4 * place)), 4)

    i64, f32 = types.int64, types.float32
    return types.void(tag, weight_tag, operand_tag, i64, i64, f32, f32, i64, i64), codegen
