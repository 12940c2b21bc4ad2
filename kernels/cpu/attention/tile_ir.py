"""The inner loops of CPU attention in LLVM IR (see simd for why and how).

In decode tiles the lanes of a vector lie along D. In prefill tiles each lane is a query row, and
elements of keys and values are broadcast, so that nothing is transposed and no lanes are summed.
Address tables keep block sizes out of the loops.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.attention.kv_types_ir import exact_pairs
from kernels.cpu.linear.linear_ir import sum_addresses
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import (
    is_amx_tag,
    is_bf16_dot_tag,
    multiply_accumulate,
    splat_bits,
)
from kernels.cpu.runtime.prefetch import prefetch, read_once_cache
from kernels.cpu.runtime.simd import LANES, size_of

_LINE = 64


@intrinsic(prefer_literal=True)
def decode_scores(
    typingctx, kv, rows, chunks, fetch, keys, count, query, q_stride, num_chunks, out, o_stride,
    next_keys,
):  # fmt: skip
    """out[r, n] = query[r] . key[n]: query [rows, D] float32, keys [count, D] of the type ``kv``.

    ``keys`` is a table of addresses. ``chunks`` is the number of vectors in D if that is known at
    compile time, else zero. With ``fetch`` the rows at the addresses in ``next_keys`` are
    prefetched.
    """
    num_rows = rows.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, _, keys, count, query, q_stride, num_chunks, out, o_stride, next_keys = args
        step = LANES * size_of(kv)

        def add_products(chunk, key, sums):
            loaded = simd.load_vector(builder, simd.offset(builder, key, chunk, simd.i64(step)), kv)
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
    return types.void(kv, rows, chunks, fetch, *(i64,) * 8), codegen


def _entry(builder, table, n):
    """An address from a table."""
    return simd.load(builder, simd.offset(builder, table, n, simd.i64(8)), simd.I64, 8)


def _fetch(builder, row, chunks, num_chunks, step):
    """Prefetch a row of so many vectors."""
    if chunks.literal_value:
        _fetch_bytes(builder, row, chunks.literal_value * step)
    else:
        _fetch_chunks(builder, row, num_chunks, step)


def _fetch_chunks(builder, row, num_chunks, step):
    """Prefetch a row whose length is not known at compile time."""
    every = max(1, _LINE // step)  # vectors in a cache line

    def fetch(line, _):
        at = simd.offset(builder, row, line, simd.i64(every * step))
        prefetch(builder, at, read_once_cache())
        return []

    num_lines = builder.sdiv(builder.add(num_chunks, simd.i64(every - 1)), simd.i64(every))
    simd.loop(builder, num_lines, [], fetch)


def _fetch_bytes(builder, row, num_bytes):
    """Prefetch a row whose length is known at compile time."""
    for begin in range(0, num_bytes, _LINE):
        prefetch(builder, builder.add(row, simd.i64(begin)), read_once_cache())


@intrinsic
def fetch_rows(typingctx, kv, table, num_rows, num_chunks):
    """Prefetch the first rows, of so many vectors each, of a table of addresses."""

    def codegen(context, builder, signature, args):
        _, table, num_rows, num_chunks = args
        step = LANES * size_of(signature.args[0])

        def fetch(n, _):
            _fetch_chunks(builder, _entry(builder, table, n), num_chunks, step)
            return []

        simd.loop(builder, num_rows, [], fetch)

    return types.void(kv, *(types.int64,) * 3), codegen


@intrinsic
def multiply_chunk(typingctx, numbers, factors):
    """Multiply sixteen float32 by as many others, in place."""

    def codegen(context, builder, signature, args):
        found, by = (simd.load(builder, each, simd.VF32, 4) for each in args)
        simd.store(builder, builder.fmul(found, by), args[0], 4)

    return types.void(types.int64, types.int64), codegen


@intrinsic
def scale_chunk(typingctx, from_tag, to_tag, source, scale, target):
    """target = source * scale for sixteen elements; source and target have types of their own."""

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
def decode_values(
    typingctx, tag, kv, rows, vectors, fetch, values, begin, count, p, p_stride, alpha, o,
    o_stride, next_values,
):  # fmt: skip
    """o[r] = o[r] * alpha[r] + sum_n p[r, n] * value[n], for ``vectors`` * 16 columns of D.

    ``values`` is a table of the addresses of ``count`` value rows, or of as many pairs of rows,
    ``begin`` a byte offset in each; p [R, count] is float32, or pairs.
    With ``fetch`` the same columns of the rows at the addresses in ``next_values`` are prefetched.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        values, begin, count, p, p_stride, alpha, o, o_stride, next_values = args[5:]
        tag, kv = signature.args[:2]
        step = LANES * size_of(kv)
        cells = sum_addresses(builder, num_rows, num_vectors, o, o_stride)
        initial = []
        for row in range(num_rows):
            scale = simd.load(builder, builder.add(alpha, simd.i64(4 * row)), simd.F32, 4)
            scale = simd.splat(builder, scale)
            for cell in cells[row * num_vectors : (row + 1) * num_vectors]:
                initial.append(builder.fmul(simd.load(builder, cell, simd.VF32, 4), scale))

        def body(n, sums):
            if fetch.literal_value:
                for row in _step_rows(builder, next_values, n, begin, tag):
                    _fetch_bytes(builder, row, num_vectors * step)
            loaded = _value_lanes(
                builder, _step_rows(builder, values, n, begin, tag), num_vectors, tag, kv
            )  # vectors x [16]

            def weight(row):
                at = simd.offset(builder, p, simd.i64(row), p_stride)
                return _broadcast_weight(builder, simd.offset(builder, at, n, simd.i64(4)), tag)

            return _add_products(builder, weight, loaded, sums, tag)

        for cell, total in zip(cells, simd.loop(builder, count, initial, body), strict=True):
            simd.store(builder, total, cell, 4)

    i64 = types.int64
    return types.void(tag, kv, rows, vectors, fetch, *(i64,) * 9), codegen


def _step_rows(builder, table, n, begin, tag):
    """Addresses ``begin`` bytes into the row of step n, or into its two neighbouring rows."""
    per_step = 2 if is_bf16_dot_tag(tag) else 1
    first = builder.mul(n, simd.i64(per_step))
    return [
        builder.add(_entry(builder, table, builder.add(first, simd.i64(row))), begin)
        for row in range(per_step)
    ]


def _value_lanes(builder, rows, num_vectors, tag, kv):
    """So many vectors of a row as float32, or of bf16 pairs interleaved from two rows."""
    if kv != types.uint16 or not is_bf16_dot_tag(tag):
        step = LANES * size_of(kv)
        found = [
            [
                simd.load_vector(builder, builder.add(row, simd.i64(vector * step)), kv)
                for row in rows
            ]
            for vector in range(num_vectors)
        ]
        return [each[0] if len(each) == 1 else exact_pairs(builder, *each) for each in found]
    together = min(num_vectors, 2)  # vectors of pairs out of one load of each row
    kind = ir.VectorType(simd.I16, LANES * together)
    found = []
    for begin in range(0, 2 * LANES * num_vectors, 2 * LANES * together):
        low, high = (simd.load(builder, builder.add(row, simd.i64(begin)), kind, 2) for row in rows)
        for first in range(0, LANES * together, LANES):
            lanes = [
                ir.Constant(simd.I32, lane + half)
                for lane in range(first, first + LANES)
                for half in (0, LANES * together)
            ]
            mask = ir.Constant(ir.VectorType(simd.I32, 2 * LANES), lanes)
            found.append(builder.bitcast(builder.shuffle_vector(low, high, mask), simd.VI32))
    return found


def _broadcast_weight(builder, address, tag):
    """A weight, or a pair of weights, in every lane."""
    return _broadcast(builder, address, tag if is_bf16_dot_tag(tag) else types.float32)


@intrinsic
def elements_per_step(typingctx, tag):
    """Elements that are multiplied at a time: two of a bf16 pair, else one."""

    def codegen(context, builder, signature, args):
        return simd.i64(2 if is_bf16_dot_tag(signature.args[0]) else 1)

    return types.int64(tag), codegen


@intrinsic
def keys_multiple(typingctx, tag):
    """Keys of a decode tile begin at a multiple of this position: vectors of keys, or AMX tiles."""

    def codegen(context, builder, signature, args):
        return simd.i64(2 * LANES if is_amx_tag(signature.args[0]) else LANES)

    return types.int64(tag), codegen


@intrinsic(prefer_literal=True)
def prefill_scores(typingctx, tag, num_keys, vectors, keys, query, query_stride, steps, scale, out):
    """out[n, r] = key[n] . query[:, r] * scale for ``num_keys`` keys; out [., R] is float32.

    ``keys`` is a table of addresses of key rows. There is a step for each element with query [D, R]
    float32, or for each pair with query [D / 2, R]; R = ``vectors`` * 16, with one row stride.
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

            def element(n):
                return _broadcast(builder, simd.offset(builder, key[n], d, step), tag)

            return _add_products(builder, element, queries, sums, tag)

        sums = simd.loop(builder, steps, [simd.vector(0.0)] * (rows * num_vectors), body)
        factor = simd.splat(builder, scale)
        cells = sum_addresses(builder, rows, num_vectors, out, query_stride)
        for cell, total in zip(cells, sums, strict=True):
            simd.store(builder, builder.fmul(total, factor), cell, 4)

    i64 = types.int64
    numbers = (i64, i64, i64, i64, types.float32, i64)
    return types.void(tag, num_keys, vectors, *numbers), codegen


@intrinsic(prefer_literal=True)
def prefill_values(typingctx, tag, dims, vectors, values, begin, count, p, stride, alpha, o):
    """o[d, r] = o[d, r] * alpha[r] + sum_n value[n, d] * p[n, r], for ``dims`` rows of D.

    ``values`` is a table of addresses, ``begin`` the byte offset of the first d in each value row.
    o [D, R] is float32 and p [count, R] too, with one row stride; or values and p are pairs.
    """
    rows, num_vectors = dims.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, values, begin, count, p, stride, alpha, o = args
        tag = signature.args[0]
        cells = sum_addresses(builder, rows, num_vectors, o, stride)
        scales = _lanes(builder, alpha, num_vectors, types.float32) * rows
        initial = [
            builder.fmul(simd.load(builder, cell, simd.VF32, 4), scale)
            for cell, scale in zip(cells, scales, strict=True)
        ]

        def body(n, sums):
            value = builder.add(_entry(builder, values, n), begin)
            at = simd.offset(builder, p, n, stride)
            weights = _lanes(builder, at, num_vectors, tag)

            def element(row):
                at = builder.add(value, simd.i64(row * _step_bytes(tag)))
                return _broadcast(builder, at, tag)

            return _add_products(builder, element, weights, sums, tag)

        for cell, total in zip(cells, simd.loop(builder, count, initial, body), strict=True):
            simd.store(builder, total, cell, 4)

    i64 = types.int64
    return types.void(tag, dims, vectors, i64, i64, i64, i64, i64, i64, i64), codegen


def _step_bytes(tag):
    """Bytes that are broadcast at a time: an element, or a pair."""
    return 4 if is_bf16_dot_tag(tag) else size_of(tag)


def _broadcast(builder, address, tag):
    """An element as float32, or a pair, in every lane."""
    if is_bf16_dot_tag(tag):
        return splat_bits(builder, simd.load(builder, address, simd.I32, 2))
    return simd.splat(builder, simd.load_scalar(builder, address, tag))


def _lanes(builder, address, num_vectors, tag):
    """Consecutive vectors of float32 or of pairs."""
    kind = simd.VI32 if is_bf16_dot_tag(tag) else simd.VF32
    return [
        simd.load(builder, builder.add(address, simd.i64(vector * LANES * 4)), kind, 4)
        for vector in range(num_vectors)
    ]


def _add_products(builder, element, lanes, sums, tag):
    """Each row's sums + element(row) * lanes, of float32 or of bf16 pairs."""
    found = []
    for row in range(len(sums) // len(lanes)):
        factor = element(row)
        for vector, old in zip(lanes, sums[row * len(lanes) :], strict=False):
            if is_bf16_dot_tag(tag):
                found.append(multiply_accumulate(builder, tag, old, factor, vector))
            else:
                found.append(simd.multiply_add(builder, factor, vector, old))
    return found


@intrinsic
def fill_chunk(typingctx, address, value):
    """Store a number in sixteen float32."""

    def codegen(context, builder, signature, args):
        address, value = args
        simd.store(builder, simd.splat(builder, value), address, 4)

    return types.void(types.int64, types.float32), codegen
