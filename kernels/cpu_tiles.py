"""The inner loops of CPU attention, spelled out in LLVM IR (see cpu_simd for why and how).

With few query rows the lanes of a vector lie along D (``*_row*``); with many, each lane is a
query row and the elements of keys and values are broadcast (``*_column*``), so that nothing is
transposed and no lanes are summed up. Tables of addresses make the loops blind to block sizes.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels import cpu_simd as simd
from kernels.cpu_pairs import dot_pairs, is_pair_tag, splat_bits
from kernels.cpu_simd import LANES, size_of

_LINE = 64


@intrinsic(prefer_literal=True)
def score_keys(
    typingctx, tag, rows, chunks, fetch, keys, count, query, q_stride, num_chunks, out, o_stride,
    next_keys,
):  # fmt: skip
    """out[r, n] = query[r] . key[n]: query [rows, D] float32, keys [count, D] elements.

    ``keys`` is a table of addresses. ``chunks`` says at compile time how many vectors there are in
    D, or is zero; with ``fetch`` the rows at the addresses in another table are brought in
    meanwhile.
    """
    num_rows = rows.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, _, keys, count, query, q_stride, num_chunks, out, o_stride, next_keys = args
        tag = signature.args[0]
        step = LANES * size_of(tag)

        def add_products(chunk, key, sums):
            loaded = simd.load_vector(
                builder, simd.offset(builder, key, chunk, simd.i64(step)), tag
            )
            result = []
            for row, partial in enumerate(sums):
                at = simd.offset(builder, query, simd.i64(row), q_stride)
                at = simd.offset(builder, at, chunk, simd.i64(LANES * 4))
                element = simd.load(builder, at, simd.VF32, 4)
                result.append(simd.multiply_add(builder, element, loaded, partial))
            return result

        def score(n, _):
            key = _entry(builder, keys, n)
            if fetch.literal_value:
                _fetch(builder, _entry(builder, next_keys, n), chunks, num_chunks, step)
            sums = [simd.vector(0.0)] * num_rows
            if chunks.literal_value:
                for chunk in range(chunks.literal_value):
                    sums = add_products(simd.i64(chunk), key, sums)
            else:
                sums = simd.loop(
                    builder, num_chunks, sums, lambda chunk, sums: add_products(chunk, key, sums)
                )
            for row, partial in enumerate(sums):
                at = simd.offset(builder, out, simd.i64(row), o_stride)
                at = simd.offset(builder, at, n, simd.i64(4))
                simd.store(builder, simd.reduce_add(builder, partial), at, 4)
            return []

        simd.loop(builder, count, [], score)

    i64 = types.int64
    return types.void(tag, rows, chunks, fetch, *(i64,) * 8), codegen


def _entry(builder, table, n):
    """An address from a table."""
    return simd.load(builder, simd.offset(builder, table, n, simd.i64(8)), simd.I64, 8)


def _fetch(builder, row, chunks, num_chunks, step):
    """Start to bring in a row of so many vectors; any address will do."""
    if chunks.literal_value:
        _fetch_bytes(builder, row, chunks.literal_value * step)
        return
    every = max(1, _LINE // step)  # vectors in a cache line

    def fetch(line, _):
        at = simd.offset(builder, row, line, simd.i64(every * step))
        simd.prefetch(builder, at, simd.Cache.NONE)
        return []

    num_lines = builder.sdiv(builder.add(num_chunks, simd.i64(every - 1)), simd.i64(every))
    simd.loop(builder, num_lines, [], fetch)


def _fetch_bytes(builder, row, num_bytes):
    """The same of a length that is known at compile time."""
    for begin in range(0, num_bytes, _LINE):
        simd.prefetch(builder, builder.add(row, simd.i64(begin)), simd.Cache.NONE)


@intrinsic
def scale_chunk(typingctx, from_tag, to_tag, source, scale, target):
    """target = source * scale: sixteen elements, each side of its own type."""

    def codegen(context, builder, signature, args):
        _, _, source, scale, target = args
        from_tag, to_tag = signature.args[:2]
        scaled = builder.fmul(
            simd.load_vector(builder, source, from_tag), simd.splat(builder, scale)
        )
        simd.store_vector(builder, scaled, target, to_tag)

    i64 = types.int64
    return types.void(from_tag, to_tag, i64, types.float32, i64), codegen


@intrinsic(prefer_literal=True)
def value_rows(
    typingctx, tag, rows, vectors, fetch, values, begin, count, p, p_stride, alpha, o, o_stride,
    next_values,
):  # fmt: skip
    """o[r] = o[r] * alpha[r] + sum_n p[r, n] * value[n], for ``vectors`` * 16 columns of D.

    ``values`` is a table of the addresses of ``count`` value rows, ``begin`` a byte offset in each.
    With ``fetch`` the same columns of the rows at the addresses in another table are brought in
    meanwhile.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, _, values, begin, count, p, p_stride, alpha, o, o_stride, next_values = args
        tag = signature.args[0]
        step = LANES * size_of(tag)
        initial = []
        for row in range(num_rows):
            scale = simd.load(builder, builder.add(alpha, simd.i64(4 * row)), simd.F32, 4)
            scale = simd.splat(builder, scale)
            at = simd.offset(builder, o, simd.i64(row), o_stride)
            for vector in range(num_vectors):
                old = simd.load(
                    builder, builder.add(at, simd.i64(vector * LANES * 4)), simd.VF32, 4
                )
                initial.append(builder.fmul(old, scale))

        def body(n, sums):
            value = builder.add(_entry(builder, values, n), begin)
            if fetch.literal_value:
                row = builder.add(_entry(builder, next_values, n), begin)
                _fetch_bytes(builder, row, num_vectors * step)
            loaded = [
                simd.load_vector(builder, builder.add(value, simd.i64(vector * step)), tag)
                for vector in range(num_vectors)
            ]  # vectors x [16]
            result = []
            for row in range(num_rows):
                at = simd.offset(builder, p, simd.i64(row), p_stride)
                weight = simd.load(builder, simd.offset(builder, at, n, simd.i64(4)), simd.F32, 4)
                weight = simd.splat(builder, weight)
                for vector in range(num_vectors):
                    old = sums[row * num_vectors + vector]
                    result.append(simd.multiply_add(builder, weight, loaded[vector], old))
            return result

        sums = simd.loop(builder, count, initial, body)
        for row in range(num_rows):
            at = simd.offset(builder, o, simd.i64(row), o_stride)
            for vector in range(num_vectors):
                new = sums[row * num_vectors + vector]
                simd.store(builder, new, builder.add(at, simd.i64(vector * LANES * 4)), 4)

    i64 = types.int64
    return types.void(tag, rows, vectors, fetch, *(i64,) * 9), codegen


@intrinsic
def softmax_row(typingctx, scores, num_chunks, maximum, total, alpha):
    """One online-softmax step over a row of scores [num_chunks * 16], in place.

    Updates the running maximum and total, and stores in ``alpha`` by what earlier sums shrink.
    """

    def codegen(context, builder, signature, args):
        scores, num_chunks, maximum, total, alpha = args
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
            simd.store(builder, weight, at, 4)
            return [builder.fadd(state[0], weight)]

        (sums,) = simd.loop(builder, num_chunks, [simd.vector(0.0)], weigh)
        shrink = builder.extract_element(
            simd.weigh_scores(builder, old, shift), ir.Constant(simd.I32, 0)
        )
        before = simd.load(builder, total, simd.F32, 4)
        now = simd.multiply_add(builder, before, shrink, simd.reduce_add(builder, sums))
        simd.store(builder, now, total, 4)
        simd.store(builder, shrink, alpha, 4)

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64), codegen


@intrinsic
def softcap_chunk(typingctx, scores, cap, log2_scale):
    """Sixteen scores become log2_scale * cap * tanh(score / cap), in place."""

    def codegen(context, builder, signature, args):
        scores, cap, log2_scale = args
        inverse = simd.splat(builder, builder.fdiv(simd.f32(1.0), cap))
        x = builder.fmul(simd.load(builder, scores, simd.VF32, 4), inverse)
        bent = simd.tanh(builder, x)
        scale = simd.splat(builder, builder.fmul(cap, log2_scale))
        simd.store(builder, builder.fmul(bent, scale), scores, 4)

    return types.void(types.int64, types.float32, types.float32), codegen


@intrinsic
def elements_per_step(typingctx, tag):
    """How many elements of a key are multiplied at a time."""

    def codegen(context, builder, signature, args):
        return simd.i64(2 if is_pair_tag(signature.args[0]) else 1)

    return types.int64(tag), codegen


@intrinsic(prefer_literal=True)
def score_columns(typingctx, tag, num_keys, vectors, keys, query, query_stride, steps, scale, out):
    """out[n, r] = key[n] . query[:, r] * scale for ``num_keys`` keys; out [., R] is float32.

    ``keys`` is a table of addresses of key rows. In so many ``steps`` elements meet query [D, R]
    float32, or pairs query [D / 2, R]; R = ``vectors`` * 16, with one row stride.
    """
    rows, num_vectors = num_keys.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, keys, query, query_stride, steps, scale, out = args
        tag = signature.args[0]
        key = [
            simd.load(builder, builder.add(keys, simd.i64(8 * n)), simd.I64, 8) for n in range(rows)
        ]

        step = simd.i64(_step_bytes(tag))

        def body(d, sums):
            at = simd.offset(builder, query, d, query_stride)
            queries = _lanes(builder, at, num_vectors, tag)
            result = []
            for n in range(rows):
                element = _broadcast(builder, simd.offset(builder, key[n], d, step), tag)
                for vector in range(num_vectors):
                    old = sums[n * num_vectors + vector]
                    result.append(_add_product(builder, element, queries[vector], old, tag))
            return result

        sums = simd.loop(builder, steps, [simd.vector(0.0)] * (rows * num_vectors), body)
        factor = simd.splat(builder, scale)
        for n in range(rows):
            at = simd.offset(builder, out, simd.i64(n), query_stride)
            for vector in range(num_vectors):
                new = builder.fmul(sums[n * num_vectors + vector], factor)
                simd.store(builder, new, builder.add(at, simd.i64(vector * LANES * 4)), 4)

    i64 = types.int64
    numbers = (i64, i64, i64, i64, types.float32, i64)
    return types.void(tag, num_keys, vectors, *numbers), codegen


@intrinsic(prefer_literal=True)
def value_columns(typingctx, tag, dims, vectors, values, begin, count, p, stride, alpha, o):
    """o[d, r] = o[d, r] * alpha[r] + sum_n value[n, d] * p[n, r], for ``dims`` rows of D.

    ``values`` is a table of addresses, ``begin`` the byte offset of the first d in each value row.
    o [D, R] is float32 and p [count, R] too, with one row stride; or values and p are pairs.
    """
    rows, num_vectors = dims.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, values, begin, count, p, stride, alpha, o = args
        tag = signature.args[0]
        initial = []
        for row in range(rows):
            at = simd.offset(builder, o, simd.i64(row), stride)
            for vector in range(num_vectors):
                lanes = simd.i64(vector * LANES * 4)
                scale = simd.load(builder, builder.add(alpha, lanes), simd.VF32, 4)
                old = simd.load(builder, builder.add(at, lanes), simd.VF32, 4)
                initial.append(builder.fmul(old, scale))

        def body(n, sums):
            value = builder.add(_entry(builder, values, n), begin)
            at = simd.offset(builder, p, n, stride)
            weights = _lanes(builder, at, num_vectors, tag)
            result = []
            for row in range(rows):
                at = builder.add(value, simd.i64(row * _step_bytes(tag)))
                element = _broadcast(builder, at, tag)
                for vector in range(num_vectors):
                    old = sums[row * num_vectors + vector]
                    result.append(_add_product(builder, element, weights[vector], old, tag))
            return result

        sums = simd.loop(builder, count, initial, body)
        for row in range(rows):
            at = simd.offset(builder, o, simd.i64(row), stride)
            for vector in range(num_vectors):
                new = sums[row * num_vectors + vector]
                simd.store(builder, new, builder.add(at, simd.i64(vector * LANES * 4)), 4)

    i64 = types.int64
    return types.void(tag, dims, vectors, i64, i64, i64, i64, i64, i64, i64), codegen


def _step_bytes(tag):
    """Of what is broadcast at a time: an element, or a pair."""
    return 4 if is_pair_tag(tag) else size_of(tag)


def _broadcast(builder, address, tag):
    """An element as float32, or a pair, sixteen times."""
    if is_pair_tag(tag):
        return splat_bits(builder, simd.load(builder, address, simd.I32, 2))
    return simd.splat(builder, simd.load_scalar(builder, address, tag))


def _lanes(builder, address, num_vectors, tag):
    """So many vectors of float32, or of pairs, that follow each other."""
    kind = simd.VI32 if is_pair_tag(tag) else simd.VF32
    return [
        simd.load(builder, builder.add(address, simd.i64(vector * LANES * 4)), kind, 4)
        for vector in range(num_vectors)
    ]


def _add_product(builder, element, lanes, sums, tag):
    """sums + element * lanes, by elements or by pairs."""
    if is_pair_tag(tag):
        return dot_pairs(builder, tag, sums, element, lanes)
    return simd.multiply_add(builder, element, lanes, sums)


@intrinsic
def fill_chunk(typingctx, address, value):
    """Sixteen float32 become the same number."""

    def codegen(context, builder, signature, args):
        address, value = args
        simd.store(builder, simd.splat(builder, value), address, 4)

    return types.void(types.int64, types.float32), codegen


@intrinsic
def softmax_columns(typingctx, scores, count, stride, maximum, total, alpha):
    """One online-softmax step for sixteen rows side by side: scores [count, 16], in place."""

    def codegen(context, builder, signature, args):
        scores, count, stride, maximum, total, alpha = args

        def largest(n, state):
            at = simd.offset(builder, scores, n, stride)
            return [simd.larger(builder, simd.load(builder, at, simd.VF32, 4), state[0])]

        old = simd.load(builder, maximum, simd.VF32, 4)
        (new,) = simd.loop(builder, count, [old], largest)
        simd.store(builder, new, maximum, 4)
        shift = simd.finite(builder, new)

        def weigh(n, state):
            at = simd.offset(builder, scores, n, stride)
            weight = simd.weigh_scores(builder, simd.load(builder, at, simd.VF32, 4), shift)
            simd.store(builder, weight, at, 4)
            return [builder.fadd(state[0], weight)]

        (sums,) = simd.loop(builder, count, [simd.vector(0.0)], weigh)
        shrink = simd.weigh_scores(builder, old, shift)
        before = simd.load(builder, total, simd.VF32, 4)
        simd.store(builder, simd.multiply_add(builder, before, shrink, sums), total, 4)
        simd.store(builder, shrink, alpha, 4)

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64), codegen
