"""Products of integers in LLVM IR: rows in 16 or 8 bits, and codes as they are stored.

Sums of a group of inputs are exact, whatever their order; what follows for each group is one chain
of float32 operations. So a row has the same bits in every batch, though rows in 16 bits, q, are
multiplied in two ways: for few rows as q = 256 * high + low, two signed bytes, since dot products
of four bytes use codes almost as they are; for many rows as they are, by dot products of pairs,
which need half as many registers for sums.

A prepared row begins with four numbers for each group of inputs: the scale of q, the sum of the
rounded inputs (float32), and the sums of high and of low, or of q and nothing, times minus the zero
point of unsigned codes (int32), with which sums begin. Its integers follow: of four inputs, four
high bytes and four low ones (HIGH_LOW), or q of inputs 0 and 2, 1 and 3 (WORDS), or q in four bytes
(BYTES).
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.linear_arguments import GROUP
from kernels.cpu.linear.linear_ir import row_addresses, sum_addresses
from kernels.cpu.quantized.packed_format import STEP_INPUTS
from kernels.cpu.quantized.quantized_ir import Tags, load_header, prefetch_codes, prefetch_header
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import (
    add_pair_products,
    fma,
    multiply_accumulate,
    splat_bits,
)
from kernels.cpu.runtime.simd import LANES

GROUP_NUMBER_BYTES = 16
"""Of the numbers of a group of inputs in a prepared row."""

# Layouts of prepared rows.
HIGH_LOW, WORDS, BYTES = range(3)

_VI8 = ir.VectorType(ir.IntType(8), LANES)
_VDWORDS = ir.VectorType(simd.I32, LANES // 4)
_MAGIC = 1.5 * 2**23  # added to a number, it rounds it, and its low bits are the integer


def _bytes_of_inputs(layout):
    return 1 if layout == BYTES else 2


def _zero_point(tags):
    return 8 if tags.four_bits else 128


def _load_fours(builder, tags, at):
    """Two vectors of four inputs of each of sixteen outputs, in bytes."""
    first = simd.load(builder, at, simd.VI32, 64)
    if not tags.four_bits:
        return first, simd.load(builder, builder.add(at, simd.i64(64)), simd.VI32, 64)
    mask = simd.repeated(0x0F0F0F0F)
    return builder.and_(first, mask), builder.and_(builder.lshr(first, simd.repeated(4)), mask)


def _load_pairs(builder, tags, at):
    """Four vectors of two inputs of each of sixteen outputs, in the order of WORDS."""
    first = simd.load(builder, at, simd.VI32, 64)
    if tags.four_bits:
        shifts, mask = [(first, right) for right in (0, 8, 4, 12)], simd.repeated(0x000F000F)
    else:
        last = simd.load(builder, builder.add(at, simd.i64(64)), simd.VI32, 64)
        shifts = [(first, 0), (first, 8), (last, 0), (last, 8)]
        mask = simd.repeated(0x00FF00FF)
    return [builder.and_(builder.lshr(each, simd.repeated(right)), mask) for each, right in shifts]


def _sum_products(builder, tags, operand_tag, layout, sums, x_at, at):
    """Add the products of eight inputs; ``sums`` has the parts of each cell in turn."""
    sums, parts = list(sums), 2 if layout == HIGH_LOW else 1
    load = _load_pairs if layout == WORDS else _load_fours
    add_products = add_pair_products if layout == WORDS else multiply_accumulate
    weights = [load(builder, tags, each) for each in at]
    for index in range(len(weights[0])):
        for row, address in enumerate(x_at):
            for part in range(parts):
                place = builder.add(address, simd.i64(4 * (parts * index + part)))
                some = splat_bits(builder, simd.load(builder, place, simd.I32, 4))
                for vector, of_panel in enumerate(weights):
                    cell = parts * (row * len(at) + vector) + part
                    sums[cell] = add_products(
                        builder, operand_tag, sums[cell], some, of_panel[index]
                    )
    return sums


def _scaled(builder, integers, numbers_at, header, total):
    """total + scales of weights and row * integers + minimums * the row's sum."""
    whole = [builder.bitcast(each, simd.VI32) for each in integers]
    product = whole[0]
    if len(whole) == 2:
        product = builder.add(builder.shl(product, simd.repeated(8)), whole[1])
    product = builder.sitofp(product, simd.VF32)
    scale = simd.splat(builder, simd.load(builder, numbers_at, simd.F32, 4))
    total = fma(builder, builder.fmul(product, scale), header.scales, total)
    if header.minimums is None:
        return total
    sum_at = builder.add(numbers_at, simd.i64(4))
    row_sum = simd.splat(builder, simd.load(builder, sum_at, simd.F32, 4))
    return fma(builder, row_sum, header.minimums, total)


@intrinsic(prefer_literal=True)
def accumulate_integers(
    typingctx,
    weight_tag,
    operand_tag,
    layout,
    rows,
    vectors,
    last,
    x,
    x_stride,
    w,
    panel,
    groups,
    steps,
    out,
    o_stride,
):
    """out[r, n] += x[r] . w[n] over ``groups`` groups of 8 * ``steps`` inputs.

    A register block is ``rows`` x ``vectors`` * 16; ``x`` has rows prepared in this layout, out
    [rows, .] is float32. Rows beyond ``last`` repeat it. ``w`` is the address of the first group of
    inputs, ``panel`` the index of the first panel in it. Weights are prefetched a little before
    they are read.
    """
    order, num_rows, num_vectors = (each.literal_value for each in (layout, rows, vectors))

    def codegen(context, builder, signature, args):
        _, _, _, _, _, last, x, x_stride, w, panel, groups, steps, out, o_stride = args
        tags, operand_tag = Tags(*signature.args[0].types), signature.args[1]
        parts = 2 if order == HIGH_LOW else 1
        row_at = row_addresses(builder, last, num_rows, x, x_stride)
        cells = sum_addresses(builder, num_rows, num_vectors, out, o_stride)
        step_bytes = simd.i64(GROUP * tags.step_bytes)
        group_bytes = builder.add(simd.i64(tags.header_bytes), builder.mul(steps, step_bytes))
        panels = [builder.add(panel, simd.i64(index)) for index in range(num_vectors)]
        bytes_at = builder.mul(groups, simd.i64(GROUP_NUMBER_BYTES))
        x_bytes = simd.i64(STEP_INPUTS * _bytes_of_inputs(order))

        def of_group(group, totals):
            header_at = simd.offset(builder, w, group, group_bytes)
            prefetch_header(builder, tags, header_at, num_vectors)
            codes = builder.add(header_at, simd.i64(tags.header_bytes))
            numbers = builder.mul(group, simd.i64(GROUP_NUMBER_BYTES))
            numbers_at = [builder.add(row, numbers) for row in row_at]
            first = builder.add(builder.mul(builder.mul(group, steps), x_bytes), bytes_at)
            initial = []
            for each in numbers_at:
                places = [builder.add(each, simd.i64(8 + 4 * part)) for part in range(parts)]
                begin = [
                    splat_bits(builder, simd.load(builder, place, simd.I32, 4)) for place in places
                ]
                initial += [builder.bitcast(part, simd.VF32) for part in begin] * num_vectors

            def of_step(step, sums):
                code_at = simd.offset(builder, codes, step, step_bytes)
                at = [simd.offset(builder, code_at, p, simd.i64(tags.step_bytes)) for p in panels]
                prefetch_codes(builder, tags, code_at, num_vectors)
                begin = simd.offset(builder, first, step, x_bytes)
                x_at = [builder.add(row, begin) for row in row_at]
                return _sum_products(builder, tags, operand_tag, order, sums, x_at, at)

            sums = simd.loop(builder, steps, initial, of_step)
            headers = [load_header(builder, tags, header_at, each) for each in panels]
            found = []
            for cell, total in enumerate(totals):
                row, vector = divmod(cell, num_vectors)
                integers = sums[parts * cell : parts * cell + parts]
                found.append(_scaled(builder, integers, numbers_at[row], headers[vector], total))
            return found

        initial = [simd.load(builder, cell, simd.VF32, 4) for cell in cells]
        totals = simd.loop(builder, groups, initial, of_group)
        for cell, total in zip(cells, totals, strict=True):
            simd.store(builder, total, cell, 4)

    numbers = (types.int64,) * 9
    return types.void(weight_tag, operand_tag, layout, rows, vectors, *numbers), codegen


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


@intrinsic
def power_of_two(typingctx, number):
    """The largest power of two that is not larger than a positive normal number."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], simd.I32)
        return builder.bitcast(builder.and_(bits, ir.Constant(simd.I32, 0x7F800000)), simd.F32)

    return types.float32(types.float32), codegen


def _as_layout(builder, layout, whole):
    """Sixteen integers as they are stored, and the parts of them that are summed."""
    if layout == BYTES:
        return builder.trunc(whole, _VI8), [whole]
    if layout == WORDS:
        lanes = [ir.Constant(simd.I32, n // 4 * 4 + (0, 2, 1, 3)[n % 4]) for n in range(LANES)]
        words = builder.trunc(whole, simd.VI16)
        return builder.shuffle_vector(words, words, ir.Constant(simd.VI32, lanes)), [whole]
    high = builder.ashr(builder.add(whole, simd.repeated(128)), simd.repeated(8))
    low = builder.sub(whole, builder.shl(high, simd.repeated(8)))
    fours = [builder.bitcast(builder.trunc(each, _VI8), _VDWORDS) for each in (high, low)]
    lanes = [ir.Constant(simd.I32, n // 2 + n % 2 * 4) for n in range(8)]
    mask = ir.Constant(ir.VectorType(simd.I32, 8), lanes)
    return builder.shuffle_vector(*fours, mask), [high, low]


@intrinsic(prefer_literal=True)
def round_inputs(typingctx, tag, weight_tag, layout, x, count, inverse, scale, numbers, target):
    """Prepare ``count`` inputs, those of a group, in a layout: x * ``inverse``, rounded.

    The group's numbers are written to ``numbers``, the integers to ``target``.
    """
    order = layout.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, x, count, inverse, scale, numbers, target = args
        tag, tags = signature.args[0], Tags(*signature.args[1].types)
        factor, magic = simd.splat(builder, inverse), simd.vector(_MAGIC)
        stride = simd.i64(LANES * simd.size_of(tag))
        written = simd.i64(LANES * _bytes_of_inputs(order))

        def body(chunk, state):
            found = simd.load_vector(builder, simd.offset(builder, x, chunk, stride), tag)
            shifted = builder.fadd(builder.fmul(found, factor), magic)
            whole = builder.sub(
                builder.bitcast(shifted, simd.VI32), builder.bitcast(magic, simd.VI32)
            )
            stored, parts = _as_layout(builder, order, whole)
            simd.store(builder, stored, simd.offset(builder, target, chunk, written), 4)
            return [builder.add(each, part) for each, part in zip(state, parts, strict=True)]

        count = builder.sdiv(count, simd.i64(LANES))
        initial = [simd.repeated(0)] * (2 if order == HIGH_LOW else 1)
        sums = simd.loop(builder, count, initial, body)
        reduce = builder.module.declare_intrinsic(
            "llvm.vector.reduce.add.v16i32", (), ir.FunctionType(simd.I32, (simd.VI32,))
        )
        sums = [builder.call(reduce, (each,)) for each in sums]
        total = sums[0]
        if len(sums) == 2:
            total = builder.add(builder.shl(total, ir.Constant(simd.I32, 8)), sums[1])
        total = builder.fmul(builder.sitofp(total, simd.F32), scale)
        simd.store(builder, scale, numbers, 4)
        simd.store(builder, total, builder.add(numbers, simd.i64(4)), 4)
        for part, each in enumerate(sums):
            begin = builder.mul(each, ir.Constant(simd.I32, -_zero_point(tags)))
            simd.store(builder, begin, builder.add(numbers, simd.i64(8 + 4 * part)), 4)

    i64, f32 = types.int64, types.float32
    return types.void(tag, weight_tag, layout, i64, i64, f32, f32, i64, i64), codegen


@intrinsic
def round_to_scale(typingctx, tag, x, count, inverse, scale, target):
    """target = x * ``inverse``, rounded, times ``scale``: ``count`` float32."""

    def codegen(context, builder, signature, args):
        _, x, count, inverse, scale, target = args
        tag = signature.args[0]
        factor, scale = simd.splat(builder, inverse), simd.splat(builder, scale)
        stride, magic = simd.i64(LANES * simd.size_of(tag)), simd.vector(_MAGIC)

        def body(chunk, _):
            found = simd.load_vector(builder, simd.offset(builder, x, chunk, stride), tag)
            shifted = builder.fadd(builder.fmul(found, factor), magic)
            rounded = builder.fmul(builder.fsub(shifted, magic), scale)
            out = simd.offset(builder, target, chunk, simd.i64(4 * LANES))
            simd.store(builder, rounded, out, 4)
            return []

        simd.loop(builder, builder.sdiv(count, simd.i64(LANES)), [], body)

    i64, f32 = types.int64, types.float32
    return types.void(tag, i64, i64, f32, f32, i64), codegen
