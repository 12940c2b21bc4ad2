"""The inner loops of scores of few rows by pairs, spelled out in LLVM IR (see simd).

What the next turn reads is brought in all along, a few cache lines at a time: memory is what decode
waits for, and it is idle while nothing is asked for.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import dot_pairs, splat_bits
from kernels.cpu.runtime.prefetch import for_read_once, prefetch
from kernels.cpu.runtime.simd import LANES

_LINE = 64  # bytes: sixteen pairs
_STEP_PAIRS = 8  # D divides by twice as many
# Lines that are brought in with sixteen keys' line, and with a step of pairs: half of all each.
_TURN_LINES, _STEP_LINES = 8, 4
# Which lanes of two vectors, in which order. Within 128 bits: the lower or upper two of each by
# turns, alone or two at a time; of 128 bits each: the even ones, or the odd ones.
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
def turn_keys(typingctx, fetch, keys, num_vectors, head_dim, out, out_stride, next_keys):
    """out [D / 2, .] pairs of so many vectors of keys [., D / 2], at the addresses in a table.

    Meanwhile as many rows at the addresses in another table are brought in; only the first half of
    them if ``fetch`` says at compile time how many cache lines a row has.
    """
    lines_each = fetch.literal_value

    def codegen(context, builder, signature, args):
        _, keys, num_vectors, head_dim, out, out_stride, next_keys = args
        num_lines = builder.lshr(head_dim, simd.i64(5))
        num_halves = builder.and_(builder.lshr(head_dim, simd.i64(4)), simd.i64(1))

        def turn_vector(vector, _):
            lanes = simd.offset(builder, out, vector, simd.i64(4 * LANES))
            table, next_table = (
                simd.offset(builder, each, vector, simd.i64(8 * LANES))
                for each in (keys, next_keys)
            )

            def turn(line, num_pairs):
                begin = builder.mul(line, simd.i64(_LINE))
                if lines_each:
                    part = builder.add(builder.mul(vector, simd.i64(lines_each)), line)
                    _fetch_part(builder, next_keys, part, _TURN_LINES // lines_each, lines_each)
                rows = []
                for lane in range(LANES):
                    if not lines_each:
                        at = builder.add(_entry(builder, next_table, simd.i64(lane)), begin)
                        prefetch(builder, at, for_read_once())
                    at = builder.add(_entry(builder, table, simd.i64(lane)), begin)
                    rows.append(_load_pairs(builder, at, num_pairs))
                at = simd.offset(builder, lanes, builder.mul(line, simd.i64(LANES)), out_stride)
                for n, pairs in enumerate(_turn(builder, rows)[:num_pairs]):
                    simd.store(builder, pairs, simd.offset(builder, at, simd.i64(n), out_stride), 4)
                return []

            simd.loop(builder, num_lines, [], lambda line, _: turn(line, LANES))
            simd.loop(builder, num_halves, [], lambda _, __: turn(num_lines, LANES // 2))
            return []

        simd.loop(builder, num_vectors, [], turn_vector)

    return types.void(fetch, *(types.int64,) * 6), codegen


@intrinsic(prefer_literal=True)
def score_turned(
    typingctx, tag, rows, vectors, fetch, keys, k_stride, head_dim, query, q_stride, scale, out,
    o_stride, next_keys,
):  # fmt: skip
    """out[r, n] = query[r] . keys[:, n] * scale for ``vectors`` * 16 keys.

    Keys [D / 2, .] and query [rows, D / 2] are pairs. If ``fetch`` says at compile time how many
    cache lines a key has, 64 lines are brought in meanwhile, of rows at the addresses in a table.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    lines_each = fetch.literal_value
    step_pairs = lines_each or _STEP_PAIRS

    def codegen(context, builder, signature, args):
        keys, k_stride, head_dim, query, q_stride, scale, out, o_stride, next_keys = args[4:]
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
                    result.append(dot_pairs(builder, tag, old, lanes[n], element))
            return result

        def add_pairs(step, sums):
            if lines_each:
                _fetch_part(builder, next_keys, step, _STEP_LINES // lines_each, lines_each)
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
    return types.void(tag, rows, vectors, fetch, *numbers), codegen


def _fetch_part(builder, table, part, num_rows, lines_each):
    """Start to bring in the n-th so many rows of a table."""
    for row in range(num_rows):
        n = builder.add(builder.mul(part, simd.i64(num_rows)), simd.i64(row))
        at = _entry(builder, table, n)
        for line in range(lines_each):
            prefetch(builder, builder.add(at, simd.i64(_LINE * line)), for_read_once())


def _entry(builder, table, n):
    """An address from a table."""
    return simd.load(builder, simd.offset(builder, table, n, simd.i64(8)), simd.I64, 8)


def _load_pairs(builder, address, num_pairs):
    """So many pairs in a vector; what is in the other lanes does not matter."""
    kind = ir.VectorType(simd.I32, num_pairs)
    found = simd.load(builder, address, kind, 2)
    if num_pairs == LANES:
        return found
    return _shuffle(builder, found, found, range(LANES))


def _turn(builder, rows):
    """Sixteen vectors become those of their first lanes, of their second lanes, and so on."""
    by_lane = []
    for first in range(0, LANES, 4):  # four rows become four vectors of four lanes of each
        a, b, c, d = rows[first : first + 4]
        for single in _SINGLES:
            left, right = _shuffle(builder, a, b, single), _shuffle(builder, c, d, single)
            by_lane += [_shuffle(builder, left, right, double) for double in _DOUBLES]
    turned = [None] * LANES
    for lane in range(4):  # of 128 bits each
        a, b, c, d = by_lane[lane::4]
        for odd, quarters in enumerate(_QUARTERS):
            left, right = _shuffle(builder, a, b, quarters), _shuffle(builder, c, d, quarters)
            for upper, again in enumerate(_QUARTERS):
                turned[4 * (odd + 2 * upper) + lane] = _shuffle(builder, left, right, again)
    return turned


def _shuffle(builder, a, b, lanes):
    mask = [ir.Constant(simd.I32, lane) for lane in lanes]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(simd.I32, len(mask)), mask))
