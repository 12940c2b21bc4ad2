"""The inner loops of CPU attention by pairs, spelled out in LLVM IR (see cpu_simd, cpu_pairs)."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels import cpu_simd as simd
from kernels.cpu_pairs import dot_pairs, splat_bits
from kernels.cpu_simd import LANES


@intrinsic(prefer_literal=True)
def score_pairs(
    typingctx, operand_tag, num_keys, vectors, keys, query, stride, num_pairs, scale, out
):
    """out[n, r] = key[n] . query[:, r] * scale for ``num_keys`` keys.

    ``keys`` is a table of addresses of key rows in bfloat16; query [D / 2, R] are pairs, out [., R]
    is float32; R = ``vectors`` * 16, with one row stride.
    """
    rows, num_vectors = num_keys.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, keys, query, stride, num_pairs, scale, out = args
        operand_tag = signature.args[0]
        key = [
            simd.load(builder, builder.add(keys, simd.i64(8 * n)), simd.I64, 8) for n in range(rows)
        ]

        def body(pair, sums):
            queries = _row(builder, simd.offset(builder, query, pair, stride), num_vectors)
            result = []
            for n in range(rows):
                at = simd.offset(builder, key[n], pair, simd.i64(4))
                element = splat_bits(builder, simd.load(builder, at, simd.I32, 2))
                for vector in range(num_vectors):
                    old = sums[n * num_vectors + vector]
                    result.append(dot_pairs(builder, operand_tag, old, element, queries[vector]))
            return result

        sums = simd.loop(builder, num_pairs, [simd.vector(0.0)] * (rows * num_vectors), body)
        factor = simd.splat(builder, scale)
        for n in range(rows):
            at = simd.offset(builder, out, simd.i64(n), stride)
            for vector in range(num_vectors):
                new = builder.fmul(sums[n * num_vectors + vector], factor)
                simd.store(builder, new, builder.add(at, simd.i64(vector * LANES * 4)), 4)

    i64 = types.int64
    numbers = (i64, i64, i64, i64, types.float32, i64)
    return types.void(operand_tag, num_keys, vectors, *numbers), codegen


@intrinsic(prefer_literal=True)
def value_pairs(
    typingctx, operand_tag, dims, vectors, values, v_stride, num_pairs, p, stride, alpha, o
):
    """o[d, r] = o[d, r] * alpha[r] + sum_n value[n, d] . p[n, r], for ``dims`` rows of D.

    values [n, D] and p [n, R] are pairs of neighbours, o [D, R] is float32 with p's row stride.
    """
    rows, num_vectors = dims.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, values, v_stride, num_pairs, p, stride, alpha, o = args
        operand_tag = signature.args[0]
        cells = [
            builder.add(
                simd.offset(builder, o, simd.i64(row), stride), simd.i64(vector * LANES * 4)
            )
            for row in range(rows)
            for vector in range(num_vectors)
        ]
        initial = []
        for index, cell in enumerate(cells):
            lanes = simd.i64(index % num_vectors * LANES * 4)
            scale = simd.load(builder, builder.add(alpha, lanes), simd.VF32, 4)
            initial.append(builder.fmul(simd.load(builder, cell, simd.VF32, 4), scale))

        def body(n, sums):
            weights = _row(builder, simd.offset(builder, p, n, stride), num_vectors)
            value = simd.offset(builder, values, n, v_stride)
            result = []
            for row in range(rows):
                at = builder.add(value, simd.i64(4 * row))
                element = splat_bits(builder, simd.load(builder, at, simd.I32, 4))
                for vector in range(num_vectors):
                    old = sums[row * num_vectors + vector]
                    result.append(dot_pairs(builder, operand_tag, old, element, weights[vector]))
            return result

        sums = simd.loop(builder, num_pairs, initial, body)
        for cell, total in zip(cells, sums, strict=True):
            simd.store(builder, total, cell, 4)

    i64 = types.int64
    return types.void(operand_tag, dims, vectors, *(i64,) * 7), codegen


@intrinsic
def fill_chunk(typingctx, address, value):
    """Sixteen float32 become the same number."""

    def codegen(context, builder, signature, args):
        address, value = args
        simd.store(builder, simd.splat(builder, value), address, 4)

    return types.void(types.int64, types.float32), codegen


@intrinsic
def pair_shares(typingctx, low, high, total, out):
    """Twice sixteen float32, by their totals, become sixteen pairs."""

    def codegen(context, builder, signature, args):
        low, high, total, out = args
        share = builder.fdiv(simd.vector(1.0), simd.load(builder, total, simd.VF32, 4))
        first, second = (
            simd.rounded_bits(
                builder, builder.fmul(simd.load(builder, address, simd.VF32, 4), share)
            )
            for address in (low, high)
        )
        second = builder.and_(second, _all(0xFFFF0000))
        simd.store(builder, builder.or_(builder.lshr(first, _all(16)), second), out, 4)

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def pair_weights(typingctx, low, high, keep_low, keep_high, out):
    """Twice sixteen float32 become sixteen pairs; what is not kept (0, else -1) becomes 0."""

    def codegen(context, builder, signature, args):
        low, high, keep_low, keep_high, out = args
        first = simd.rounded_bits(builder, simd.load(builder, low, simd.VF32, 4))
        second = simd.rounded_bits(builder, simd.load(builder, high, simd.VF32, 4))
        first = builder.and_(builder.lshr(first, _all(16)), _mask(builder, keep_low))
        second = builder.and_(builder.and_(second, _all(0xFFFF0000)), _mask(builder, keep_high))
        simd.store(builder, builder.or_(first, second), out, 4)

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def pair_values(typingctx, low, high, keep_low, keep_high, num_chunks, out):
    """Two rows of bfloat16 become one of pairs; ``low`` and ``high`` are where their addresses are.

    What is not kept (0, else -1) is 0. A row has ``num_chunks`` times sixteen elements.
    """

    def codegen(context, builder, signature, args):
        low_at, high_at, keep_low, keep_high, num_chunks, out = args
        low = simd.load(builder, low_at, simd.I64, 8)
        high = simd.load(builder, high_at, simd.I64, 8)
        masks = _mask(builder, keep_low), _mask(builder, keep_high)

        def body(chunk, _):
            halves = []
            for row, mask in zip((low, high), masks, strict=True):
                at = simd.offset(builder, row, chunk, simd.i64(2 * LANES))
                loaded = builder.zext(simd.load(builder, at, simd.VI16, 2), simd.VI32)
                halves.append(builder.and_(loaded, mask))
            pairs = builder.or_(halves[0], builder.shl(halves[1], _all(16)))
            simd.store(builder, pairs, simd.offset(builder, out, chunk, simd.i64(4 * LANES)), 4)
            return []

        simd.loop(builder, num_chunks, [], body)

    return types.void(*(types.int64,) * 6), codegen


def _row(builder, address, num_vectors):
    """So many vectors of pairs that follow each other."""
    return [
        simd.load(builder, builder.add(address, simd.i64(vector * LANES * 4)), simd.VI32, 4)
        for vector in range(num_vectors)
    ]


def _all(number):
    return ir.Constant(simd.VI32, [ir.Constant(simd.I32, number)] * LANES)


def _mask(builder, keep):
    return splat_bits(builder, builder.trunc(keep, simd.I32))
