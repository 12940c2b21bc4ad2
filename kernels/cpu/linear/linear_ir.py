"""The inner loops of linear layers in LLVM IR (see simd for why and how).

Each lane of a vector is an output; elements of rows are broadcast. Whatever the number of rows, an
output is one chain of fused multiplications and additions over the inputs in their order, so that
a row has the same bits in every batch.

Weights in bfloat16 lie in pairs of inputs (see weight_packing). The operand tag decides whether
rows are multiplied element by element or as bf16 pairs (see bf16_dot).
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import math

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import (
    fma,
    high_halves,
    is_bf16_dot_tag,
    low_halves,
    multiply_accumulate,
    splat_bits,
)
from kernels.cpu.runtime.prefetch import Cache, prefetch, read_once_cache
from kernels.cpu.runtime.simd import LANES

_LINE_BYTES = 64
_PAIR_BYTES = 4 * LANES  # a pair of inputs, or one float32 input, for sixteen outputs
# Values of ``ahead`` that are no addresses: prefetch nothing, or the panel's own weights, which
# then do not push the code and data of other processes out of the larger caches.
NOTHING = 0
ITS_OWN = 1
# The distance of prefetches from reads: lines that are closer come too late, and lines farther away
# have left the L1 cache before they are read.
_SOON_BYTES = 12 * _LINE_BYTES


def multiply_pairs(builder, operand_tag, sums, x_at, pairs):
    """Add the dot products of a pair of inputs of each row and the pairs of each output."""
    sums = list(sums)
    for row, address in enumerate(x_at):
        x_pair = splat_bits(builder, simd.load(builder, address, simd.I32, 2))
        for vector, pair in enumerate(pairs):
            cell = row * len(pairs) + vector
            sums[cell] = multiply_accumulate(builder, operand_tag, sums[cell], x_pair, pair)
    return sums


def multiply_elements(builder, sums, x_at, weights):
    """Add the products of one input of each row and the weights of each output."""
    sums = list(sums)
    for row, address in enumerate(x_at):
        element = simd.splat(builder, simd.load(builder, address, simd.F32, 4))
        for vector, weight in enumerate(weights):
            cell = row * len(weights) + vector
            sums[cell] = fma(builder, element, weight, sums[cell])
    return sums


def _add_products(builder, operand_tag, narrow, sums, x_at, w_at):
    """Add the products of two inputs: pairs, or one after the other, bfloat16 weights widened."""
    pairs = [simd.load(builder, address, simd.VI32, 64) for address in w_at] if narrow else []
    if operand_tag != types.float32:
        return multiply_pairs(builder, operand_tag, sums, x_at, pairs)
    for half in (0, 1):
        if narrow:
            widen = high_halves if half else low_halves
            weights = [widen(builder, pair) for pair in pairs]
        else:
            begin = simd.i64(half * _PAIR_BYTES)
            addresses = [builder.add(address, begin) for address in w_at]
            weights = [simd.load(builder, address, simd.VF32, 64) for address in addresses]
        elements = [builder.add(address, simd.i64(4 * half)) for address in x_at]
        sums = multiply_elements(builder, sums, elements, weights)
    return sums


@intrinsic(prefer_literal=True)
def accumulate(
    typingctx,
    weight_tag,
    operand_tag,
    rows,
    vectors,
    last,
    x,
    x_stride,
    w,
    w_stride,
    steps,
    ahead,
    also_ahead,
    out,
    o_stride,
):
    """out[r, n] += x[r] . w[n] over 2 * ``steps`` inputs.

    A register block is ``rows`` x ``vectors`` * 16; out [rows, .] is float32. Rows beyond ``last``
    repeat it. ``w`` is the address in the first panel, ``w_stride`` the distance to the next one.
    As many weights of a panel are prefetched from the addresses ``ahead`` and ``also_ahead`` on;
    with NOTHING none are; with ITS_OWN those of ``w`` a little before they are read, for weights
    that are read only once.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    is_address = not isinstance(ahead, types.Literal)
    is_own = not is_address and ahead.literal_value == ITS_OWN

    def codegen(context, builder, signature, args):
        _, _, _, _, last, x, x_stride, w, w_stride, steps, *ahead_at, out, o_stride = args
        weight_tag, operand_tag = signature.args[:2]
        narrow = weight_tag == types.uint16
        w_step = simd.i64(_PAIR_BYTES if narrow else 2 * _PAIR_BYTES)
        x_step = simd.i64(8 if operand_tag == types.float32 else 4)
        row_at = row_addresses(builder, last, num_rows, x, x_stride)
        panel_at = [simd.offset(builder, w, simd.i64(v), w_stride) for v in range(num_vectors)]
        cells = sum_addresses(builder, num_rows, num_vectors, out, o_stride)

        def body(step, sums):
            w_at = [simd.offset(builder, panel, step, w_step) for panel in panel_at]
            x_at = [simd.offset(builder, row, step, x_step) for row in row_at]
            if is_own:
                soon = [builder.add(panel, simd.i64(_SOON_BYTES)) for panel in w_at]
                prefetch_lines(builder, soon, w_step.constant, read_once_cache())
            elif is_address:
                later = [simd.offset(builder, panel, step, w_step) for panel in ahead_at]
                prefetch_lines(builder, later, w_step.constant, Cache.L2)
            return _add_products(builder, operand_tag, narrow, sums, x_at, w_at)

        initial = [simd.load(builder, cell, simd.VF32, 4) for cell in cells]
        sums = simd.loop(builder, steps, initial, body)
        for cell, total in zip(cells, sums, strict=True):
            simd.store(builder, total, cell, 4)

    i64 = types.int64
    numbers = (i64,) * 10
    return types.void(weight_tag, operand_tag, rows, vectors, *numbers), codegen


def sum_addresses(builder, num_rows, num_vectors, out, stride):
    """Addresses of sixteen sums each, row by row."""
    return [
        builder.add(simd.offset(builder, out, simd.i64(row), stride), simd.i64(4 * LANES * vector))
        for row in range(num_rows)
        for vector in range(num_vectors)
    ]


def prefetch_lines(builder, addresses, num_bytes, cache):
    """Prefetch so many bytes from each of the addresses on."""
    for address in addresses:
        for begin in range(0, num_bytes, _LINE_BYTES):
            prefetch(builder, builder.add(address, simd.i64(begin)), cache)


def row_addresses(builder, last, num_rows, base, stride):
    """Addresses of so many rows; rows beyond the last one repeat it."""
    found = []
    for row in range(num_rows):
        index = simd.i64(row)
        if row:
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
        found.append(simd.offset(builder, base, index, stride))
    return found


@intrinsic
def is_of_pairs(typingctx, operand_tag):
    """Whether rows are multiplied as bf16 pairs."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(1), int(is_bf16_dot_tag(signature.args[0])))

    return types.boolean(operand_tag), codegen


@intrinsic
def clear_chunk(typingctx, address):
    """Store zero in sixteen float32."""

    def codegen(context, builder, signature, args):
        simd.store(builder, simd.vector(0.0), args[0], 4)

    return types.void(types.int64), codegen


@intrinsic
def widen_chunk(typingctx, tag, source, target):
    """Widen sixteen elements to float32."""

    def codegen(context, builder, signature, args):
        _, source, target = args
        simd.store(builder, simd.load_vector(builder, source, signature.args[0]), target, 4)

    return types.void(tag, types.int64, types.int64), codegen


@intrinsic
def add_chunk(typingctx, tag, sums, source):
    """sums += source: sixteen float32 and as many elements."""

    def codegen(context, builder, signature, args):
        _, sums, source = args
        added = simd.load_vector(builder, source, signature.args[0])
        total = builder.fadd(simd.load(builder, sums, simd.VF32, 4), added)
        simd.store(builder, total, sums, 4)

    return types.void(tag, types.int64, types.int64), codegen


@intrinsic
def sum_chunk(typingctx, tag, left, right, out):
    """out = left + right: sixteen elements each, added in float32, then rounded."""

    def codegen(context, builder, signature, args):
        _, left, right, out = args
        tag = signature.args[0]
        total = builder.fadd(
            simd.load_vector(builder, left, tag), simd.load_vector(builder, right, tag)
        )
        simd.store_vector(builder, total, out, tag)

    return types.void(tag, types.int64, types.int64, types.int64), codegen


@intrinsic
def round_chunk(typingctx, tag, sums, out):
    """out = sums, sixteen of them, rounded to the element type."""

    def codegen(context, builder, signature, args):
        _, sums, out = args
        simd.store_vector(builder, simd.load(builder, sums, simd.VF32, 4), out, signature.args[0])

    return types.void(tag, types.int64, types.int64), codegen


@intrinsic
def silu_gate_chunk(typingctx, gate, up):
    """gate = silu(gate) * up, sixteen float32 each."""

    def codegen(context, builder, signature, args):
        gate_at, up_at = args
        gate = simd.load(builder, gate_at, simd.VF32, 4)
        up = simd.load(builder, up_at, simd.VF32, 4)
        zero, one = simd.vector(0.0), simd.vector(1.0)
        negative = builder.fcmp_ordered("olt", gate, zero)
        # exp(-|gate|) never overflows.
        below = builder.select(negative, gate, builder.fneg(gate))
        t = simd.exp2(builder, builder.fmul(below, simd.vector(math.log2(math.e))))
        numerator = builder.select(negative, builder.fmul(gate, t), gate)
        silu = builder.fdiv(numerator, builder.fadd(one, t))
        simd.store(builder, builder.fmul(silu, up), gate_at, 4)

    return types.void(types.int64, types.int64), codegen
