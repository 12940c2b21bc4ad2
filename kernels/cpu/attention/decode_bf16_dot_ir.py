"""The inner loops of a decode tile's scores with dot products of bf16 pairs, in LLVM IR (see simd).

The keys of the next tile are prefetched all along, a few cache lines at a time: decode waits for
memory, which is idle while no line is requested.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.attention.kv_types_ir import load_octets
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import multiply_accumulate, splat_bits
from kernels.cpu.runtime.prefetch import prefetch, read_once_cache
from kernels.cpu.runtime.simd import LANES

_LINE = 64  # bytes: sixteen pairs
_STEP_PAIRS = 8  # D divides by twice as many
# Lines that are prefetched with a line of sixteen keys, and with a step of pairs: half of all each.
_TRANSPOSE_LINES, _STEP_LINES = 8, 4
# Shuffles of the lanes of two vectors. Within 128 bits: the lower or upper two lanes of each,
# alternating one by one or two by two; of 128 bits each: the even quarters, or the odd ones.
_SINGLES = tuple(
    [
        4 * quarter + lane + LANES * other
        for quarter in range(4)
        for lane in half
        for other in (0, 1)
    ]
    for half in ((0, 1), (2, 3))
)
_DOUBLES = tuple(
    [
        4 * quarter + lane + LANES * other
        for quarter in range(4)
        for other in (0, 1)
        for lane in half
    ]
    for half in ((0, 1), (2, 3))
)
_QUARTERS = tuple(
    [4 * quarter + lane for quarter in range(odd, 8, 2) for lane in range(4)] for odd in (0, 1)
)


@intrinsic(prefer_literal=True)
def transpose_keys(
    typingctx, tag, kv, fetch, keys, num_vectors, head_dim, out, out_stride, next_keys
):
    """Transpose ``num_vectors`` * 16 keys [., D / 2] of pairs, at addresses in a table, to ``out``
    [D / 2, .].

    Keys in eight bits become pairs. As many rows at the addresses in ``next_keys`` are prefetched;
    only the first half of them if ``fetch`` is the number of cache lines of a row of pairs, known
    at compile time, instead of zero.
    """
    lines_each = fetch.literal_value
    row_bytes = lines_each * _LINE * simd.size_of(kv) // 2
    line_bytes = _LINE * simd.size_of(kv) // 2  # sixteen pairs

    def codegen(context, builder, signature, args):
        keys, num_vectors, head_dim, out, out_stride, next_keys = args[3:]
        num_lines = builder.lshr(head_dim, simd.i64(5))
        num_halves = builder.and_(builder.lshr(head_dim, simd.i64(4)), simd.i64(1))

        def transpose_vector(vector, _):
            lanes = simd.offset(builder, out, vector, simd.i64(4 * LANES))
            table, next_table = (
                simd.offset(builder, each, vector, simd.i64(8 * LANES))
                for each in (keys, next_keys)
            )

            def transpose(line, num_pairs):
                begin = builder.mul(line, simd.i64(line_bytes))
                if lines_each:
                    part = builder.add(builder.mul(vector, simd.i64(lines_each)), line)
                    _prefetch_part(
                        builder, next_keys, part, _TRANSPOSE_LINES // lines_each, row_bytes
                    )
                rows = []
                for lane in range(LANES):
                    if not lines_each:
                        at = builder.add(_entry(builder, next_table, simd.i64(lane)), begin)
                        prefetch(builder, at, read_once_cache())
                    at = builder.add(_entry(builder, table, simd.i64(lane)), begin)
                    rows.append(_load_pairs(builder, at, num_pairs, tag, kv))
                at = simd.offset(builder, lanes, builder.mul(line, simd.i64(LANES)), out_stride)
                for n, pairs in enumerate(_transpose(builder, rows)[:num_pairs]):
                    simd.store(builder, pairs, simd.offset(builder, at, simd.i64(n), out_stride), 4)
                return []

            simd.loop(builder, num_lines, [], lambda line, _: transpose(line, LANES))
            simd.loop(builder, num_halves, [], lambda _, __: transpose(num_lines, LANES // 2))
            return []

        simd.loop(builder, num_vectors, [], transpose_vector)

    return types.void(tag, kv, fetch, *(types.int64,) * 6), codegen


@intrinsic(prefer_literal=True)
def score_transposed(
    typingctx, tag, kv, rows, vectors, fetch, keys, k_stride, head_dim, query, q_stride, scale, out,
    o_stride, next_keys,
):  # fmt: skip
    """out[r, n] = query[r] . keys[:, n] * scale for ``vectors`` * 16 keys.

    Keys [D / 2, .] and query [rows, D / 2] are pairs. If ``fetch`` is the number of cache lines of
    a key of pairs, known at compile time, 64 / ``fetch`` rows of the type ``kv`` at the addresses
    in ``next_keys`` are prefetched.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    lines_each = fetch.literal_value
    row_bytes = lines_each * _LINE * simd.size_of(kv) // 2
    step_pairs = lines_each or _STEP_PAIRS

    def codegen(context, builder, signature, args):
        keys, k_stride, head_dim, query, q_stride, scale, out, o_stride, next_keys = args[5:]
        tag = signature.args[0]

        def add_pair(pair, sums):
            at = simd.offset(builder, keys, pair, k_stride)
            lanes = [
                simd.load(builder, builder.add(at, simd.i64(4 * LANES * n)), simd.VI32, 4)
                for n in range(num_vectors)
            ]
            result = []
            for row in range(num_rows):
                at = simd.offset(builder, query, simd.i64(row), q_stride)
                at = simd.offset(builder, at, pair, simd.i64(4))
                element = splat_bits(builder, simd.load(builder, at, simd.I32, 4))
                for n in range(num_vectors):
                    old = sums[row * num_vectors + n]
                    result.append(multiply_accumulate(builder, tag, old, lanes[n], element))
            return result

        def add_pairs(step, sums):
            if lines_each:
                _prefetch_part(builder, next_keys, step, _STEP_LINES // lines_each, row_bytes)
            first = builder.mul(step, simd.i64(step_pairs))
            for pair in range(step_pairs):
                sums = add_pair(builder.add(first, simd.i64(pair)), sums)
            return sums

        num_steps = builder.udiv(head_dim, simd.i64(2 * step_pairs))
        initial = [simd.vector(0.0)] * (num_rows * num_vectors)
        sums = simd.loop(builder, num_steps, initial, add_pairs)
        factor = simd.splat(builder, scale)
        for row in range(num_rows):
            at = simd.offset(builder, out, simd.i64(row), o_stride)
            for n in range(num_vectors):
                scores = builder.fmul(sums[row * num_vectors + n], factor)
                simd.store(builder, scores, builder.add(at, simd.i64(4 * LANES * n)), 4)

    i64 = types.int64
    numbers = (i64, i64, i64, i64, i64, types.float32, i64, i64, i64)
    return types.void(tag, kv, rows, vectors, fetch, *numbers), codegen


def _prefetch_part(builder, table, part, num_rows, row_bytes):
    """Prefetch rows [part * num_rows, (part + 1) * num_rows) of an address table."""
    for row in range(num_rows):
        n = builder.add(builder.mul(part, simd.i64(num_rows)), simd.i64(row))
        at = _entry(builder, table, n)
        for begin in range(0, row_bytes, _LINE):
            prefetch(builder, builder.add(at, simd.i64(begin)), read_once_cache())


def _entry(builder, table, n):
    """An address from a table."""
    return simd.load(builder, simd.offset(builder, table, n, simd.i64(8)), simd.I64, 8)


def _load_pairs(builder, address, num_pairs, tag, kv):
    """So many pairs in a vector; the other lanes have any bits."""
    kind = ir.VectorType(simd.I32, num_pairs)
    if kv == types.int8:
        found = load_octets(builder, tag, address, num_pairs)
    else:
        found = simd.load(builder, address, kind, 2)
    if num_pairs == LANES:
        return found
    return _shuffle(builder, found, found, range(LANES))


def _transpose(builder, rows):
    """Transpose sixteen vectors: the first lanes of all, the second lanes of all, and so on."""
    by_lane = []
    for first in range(0, LANES, 4):  # four rows become four vectors of four lanes of each
        a, b, c, d = rows[first : first + 4]
        for single in _SINGLES:
            left, right = _shuffle(builder, a, b, single), _shuffle(builder, c, d, single)
            by_lane += [_shuffle(builder, left, right, double) for double in _DOUBLES]
    transposed = [None] * LANES
    for lane in range(4):  # of 128 bits each
        a, b, c, d = by_lane[lane::4]
        for odd, quarters in enumerate(_QUARTERS):
            left, right = _shuffle(builder, a, b, quarters), _shuffle(builder, c, d, quarters)
            for upper, again in enumerate(_QUARTERS):
                transposed[4 * (odd + 2 * upper) + lane] = _shuffle(builder, left, right, again)
    return transposed


def _shuffle(builder, a, b, lanes):
    mask = [ir.Constant(simd.I32, lane) for lane in lanes]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(simd.I32, len(mask)), mask))
