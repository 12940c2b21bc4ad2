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
def largest_of_row(typingctx, tag, x, count):
    """The largest magnitude of ``count`` elements, a multiple of sixteen; a NaN is passed over."""

    def codegen(context, builder, signature, args):
        _, x, count = args

        def step(_, found, largest):
            return simd.larger(builder, _unary(builder, "fabs", found), largest)

        largest = _over_row(builder, signature.args[0], x, count, simd.vector(0.0), step)
        return _reduce(builder, "llvm.vector.reduce.fmax.v16f32", simd.F32, largest)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def squares_of_row(typingctx, tag, x, count):
    """The sum of squares of ``count`` elements, a multiple of sixteen."""

    def codegen(context, builder, signature, args):
        _, x, count = args

        def step(_, found, squares):
            return simd.multiply_add(builder, found, found, squares)

        squares = _over_row(builder, signature.args[0], x, count, simd.vector(0.0), step)
        return simd.reduce_add(builder, squares)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def code_row(typingctx, tag, x, inverse, scale, count, codes, rest):
    """codes = x * inverse, rounded, as int8; rest = x - scale * codes as float32.

    Returns the sum of the codes.
    """

    def codegen(context, builder, signature, args):
        _, x, inverse, scale, count, codes, rest = args
        inverse, scale = simd.splat(builder, inverse), simd.splat(builder, scale)

        def step(chunk, found, total):
            rounded = _unary(builder, "rint", builder.fmul(found, inverse))
            code = builder.fptosi(rounded, simd.VI32)
            narrow = builder.trunc(code, _VI8)
            simd.store(builder, narrow, simd.offset(builder, codes, chunk, simd.i64(LANES)), 1)
            left = simd.multiply_add(builder, builder.fneg(scale), rounded, found)
            simd.store(builder, left, simd.offset(builder, rest, chunk, simd.i64(4 * LANES)), 4)
            return builder.add(code, total)

        total = _over_row(builder, signature.args[0], x, count, simd.repeated(0), step)
        total = _reduce(builder, "llvm.vector.reduce.add.v16i32", simd.I32, total)
        return builder.sext(total, simd.I64)

    f32, i64 = types.float32, types.int64
    return types.int64(tag, i64, f32, f32, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def bound_panel(
    typingctx, some_fine, num_rows, facts, sums, scales, errors, norms, bounds, bounds_row
):
    """Of each row, what the sixteen outputs of a panel do not exceed, to bounds[row].

    ``sums`` are those of the rows' codes, [rows, TILE_ROW bytes] int32; ``scales``, ``errors`` and
    ``norms`` addresses of those of the outputs. ``some_fine``: 1 if there are finer codes.
    """
    has_fine = some_fine.literal_value

    def codegen(context, builder, signature, args):
        _, num_rows, facts, sums, scales, errors, norms, bounds, bounds_row = args
        scale, error, norm = (
            simd.load(builder, at, simd.VF32, 4) for at in (scales, errors, norms)
        )

        def bound(row, state):
            fact = simd.offset(builder, facts, row, simd.i64(fields.FACT_BYTES))
            total = _times_codes(builder, fact, fields.OFFSET, fields.SCALE, sums, row)
            if has_fine:
                fine_row = _of_row(builder, fact, fields.FINE_ROW, simd.I32)
                fine_row = builder.sext(fine_row, simd.I64)
                at = fields.FINE_OFFSET, fields.FINE_SCALE
                fine = _times_codes(builder, fact, *at, sums, fine_row)
                total = builder.fadd(total, fine)
            bound = builder.fmul(total, scale)
            for of_output, place in ((error, fields.SIZE), (norm, fields.REST_SIZE)):
                size = simd.splat(builder, _of_row(builder, fact, place, simd.F32))
                bound = simd.multiply_add(builder, of_output, size, bound)
            # Nobody looks at the bounds of a row that is no number.
            name = "llvm.vector.reduce.fmax.v16f32"
            largest = _reduce(builder, name, simd.F32, bound, fastmath=("nnan",))
            simd.store(builder, largest, simd.offset(builder, bounds, row, bounds_row), 4)
            return []

        simd.loop(builder, num_rows, [], bound)

    return types.void(some_fine, *(types.int64,) * 8), codegen


def _of_row(builder, fact, place, what):
    return simd.load(builder, builder.add(fact, simd.i64(place)), what, 4)


def _times_codes(builder, fact, offset, scale, sums, row):
    """The share of the input that codes are, times the codes of sixteen outputs' weights."""
    at = simd.offset(builder, sums, row, simd.i64(TILE_ROW))
    offset = splat_bits(builder, _of_row(builder, fact, offset, simd.I32))
    exact = builder.sub(simd.load(builder, at, simd.VI32, 4), offset)
    scale = simd.splat(builder, _of_row(builder, fact, scale, simd.F32))
    return builder.fmul(builder.sitofp(exact, simd.VF32), scale)


@intrinsic
def reached(typingctx, address, threshold):
    """Which of sixteen float32 are no less than the threshold: a bit for each."""

    def codegen(context, builder, signature, args):
        values = simd.load(builder, args[0], simd.VF32, 4)
        reach = builder.fcmp_ordered("oge", values, simd.splat(builder, args[1]))
        return simd.lane_bits(builder, reach)

    return types.int64(types.int64, types.float32), codegen
