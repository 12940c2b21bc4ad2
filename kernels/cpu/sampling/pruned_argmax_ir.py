"""The inner loops of ``pruned_argmax_kernel`` in LLVM IR (see simd for why and how)."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.linear_arguments import TILE_ROW
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import splat_bits
from kernels.cpu.runtime.simd import LANES
from kernels.cpu.sampling import pruned_argmax_arguments as fields

_VI8 = ir.VectorType(ir.IntType(8), LANES)


def _reduce(builder, name, result, vector, fastmath=()):
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(result, (vector.type,)))
    return builder.call(function, (vector,), fastmath=fastmath)


def _unary(builder, name, vector):
    kind = ir.FunctionType(simd.VF32, (simd.VF32,))
    return builder.call(
        builder.module.declare_intrinsic(f"llvm.{name}.v16f32", (), kind), (vector,)
    )


def _over_row(builder, tag, x, count, initial, step):
    """``step`` over the vectors of a row of ``count`` elements, a multiple of sixteen."""
    stride = simd.i64(LANES * simd.size_of(tag))

    def body(chunk, state):
        found = simd.load_vector(builder, simd.offset(builder, x, chunk, stride), tag)
        return [step(chunk, found, state[0])]

    num_chunks = builder.sdiv(count, simd.i64(LANES))
    (total,) = simd.loop(builder, num_chunks, [initial], body)
    return total


@intrinsic
def absmax_of_row(typingctx, tag, x, count):
    """The largest magnitude of ``count`` elements, a multiple of sixteen; NaNs are skipped."""

    def codegen(context, builder, signature, args):
        _, x, count = args

        def step(_, found, largest):
            return simd.larger(builder, _unary(builder, "fabs", found), largest)

        largest = _over_row(builder, signature.args[0], x, count, simd.vector(0.0), step)
        return _reduce(builder, "llvm.vector.reduce.fmax.v16f32", simd.F32, largest)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def sum_of_squares(typingctx, tag, x, count):
    """The sum of squares of ``count`` elements, a multiple of sixteen."""

    def codegen(context, builder, signature, args):
        _, x, count = args

        def step(_, found, squares):
            return simd.multiply_add(builder, found, found, squares)

        squares = _over_row(builder, signature.args[0], x, count, simd.vector(0.0), step)
        return simd.reduce_add(builder, squares)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def quantize_row(typingctx, tag, x, inverse, scale, count, quantized, residual):
    """Store quantized = x * inverse, rounded, as int8, and residual = x - scale * quantized.

    Returns the sum of the quantized row; the residual is float32.
    """

    def codegen(context, builder, signature, args):
        _, x, inverse, scale, count, quantized, residual = args
        inverse, scale = simd.splat(builder, inverse), simd.splat(builder, scale)

        def step(chunk, found, total):
            rounded = _unary(builder, "rint", builder.fmul(found, inverse))
            integers = builder.fptosi(rounded, simd.VI32)
            narrow = builder.trunc(integers, _VI8)
            simd.store(builder, narrow, simd.offset(builder, quantized, chunk, simd.i64(LANES)), 1)
            left = simd.multiply_add(builder, builder.fneg(scale), rounded, found)
            simd.store(builder, left, simd.offset(builder, residual, chunk, simd.i64(4 * LANES)), 4)
            return builder.add(integers, total)

        total = _over_row(builder, signature.args[0], x, count, simd.repeated(0), step)
        total = _reduce(builder, "llvm.vector.reduce.add.v16i32", simd.I32, total)
        return builder.sext(total, simd.I64)

    f32, i64 = types.float32, types.int64
    return types.int64(tag, i64, f32, f32, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def bound_panel(
    typingctx, some_residuals, num_rows, stats, sums, scales, errors, norms, bounds, bounds_row
):
    """Store an upper bound of each row's sixteen outputs of a panel to bounds[row].

    ``sums`` are products of the quantized rows, [rows, TILE_ROW bytes] int32; ``scales``,
    ``errors`` and ``norms`` are addresses of those of the outputs. ``some_residuals``: 1 if there
    are quantized residuals.
    """
    has_residuals = some_residuals.literal_value

    def codegen(context, builder, signature, args):
        _, num_rows, stats, sums, scales, errors, norms, bounds, bounds_row = args
        scale, error, norm = (
            simd.load(builder, at, simd.VF32, 4) for at in (scales, errors, norms)
        )

        def bound(row, state):
            of_row = simd.offset(builder, stats, row, simd.i64(fields.STATS_BYTES))
            total = _dequantized(builder, of_row, fields.OFFSET, fields.SCALE, sums, row)
            if has_residuals:
                residual_row = _of_row(builder, of_row, fields.RESIDUAL_ROW, simd.I32)
                residual_row = builder.sext(residual_row, simd.I64)
                at = fields.RESIDUAL_OFFSET, fields.RESIDUAL_SCALE
                by_residual = _dequantized(builder, of_row, *at, sums, residual_row)
                total = builder.fadd(total, by_residual)
            bound = builder.fmul(total, scale)
            for of_output, place in ((error, fields.NORM), (norm, fields.RESIDUAL_NORM)):
                size = simd.splat(builder, _of_row(builder, of_row, place, simd.F32))
                bound = simd.multiply_add(builder, of_output, size, bound)
            # A NaN needs no care: the bounds of such a row are not read.
            name = "llvm.vector.reduce.fmax.v16f32"
            largest = _reduce(builder, name, simd.F32, bound, fastmath=("nnan",))
            simd.store(builder, largest, simd.offset(builder, bounds, row, bounds_row), 4)
            return []

        simd.loop(builder, num_rows, [], bound)

    return types.void(some_residuals, *(types.int64,) * 8), codegen


def _of_row(builder, stats, place, what):
    return simd.load(builder, builder.add(stats, simd.i64(place)), what, 4)


def _dequantized(builder, stats, offset, scale, sums, row):
    """Products of a quantized row and sixteen outputs' quantized weights, times the row's scale."""
    at = simd.offset(builder, sums, row, simd.i64(TILE_ROW))
    offset = splat_bits(builder, _of_row(builder, stats, offset, simd.I32))
    exact = builder.sub(simd.load(builder, at, simd.VI32, 4), offset)
    scale = simd.splat(builder, _of_row(builder, stats, scale, simd.F32))
    return builder.fmul(builder.sitofp(exact, simd.VF32), scale)


@intrinsic
def reached(typingctx, address, threshold):
    """A bit for each of sixteen float32: whether it is no less than the threshold."""

    def codegen(context, builder, signature, args):
        values = simd.load(builder, args[0], simd.VF32, 4)
        reach = builder.fcmp_ordered("oge", values, simd.splat(builder, args[1]))
        return simd.lane_bits(builder, reach)

    return types.int64(types.int64, types.float32), codegen
