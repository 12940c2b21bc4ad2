"""Products of rows in eight bits and codes in LLVM IR.

Sums of a group of inputs are exact, whatever their order; what follows for each group is one chain
of float32 operations. So a row has the same bits in every batch.
"""

from kernels.cpu.quantized.input_rounding_ir import GROUP_NUMBER_BYTES
from kernels.cpu.quantized.packed_format import STEP_INPUTS
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import fma, multiply_accumulate, splat_bits


def add_integers(builder, operand_tag, inputs, group, row_at, cells):
    """Add the products of a group of inputs to the totals at addresses, those of row after row.

    Registers hold the integers alone.
    """
    num_panels = len(inputs.panels)
    numbers = builder.mul(group, simd.i64(GROUP_NUMBER_BYTES))
    numbers_at = [builder.add(row, numbers) for row in row_at]
    first = builder.mul(inputs.first_step(group), simd.i64(STEP_INPUTS))
    first = builder.add(first, builder.mul(inputs.count, simd.i64(GROUP_NUMBER_BYTES)))
    initial = []
    for each in numbers_at:
        begin = simd.load(builder, builder.add(each, simd.i64(8)), simd.I32, 4)
        initial += [builder.bitcast(splat_bits(builder, begin), simd.VF32)] * num_panels

    def of_step(step, codes_at, sums):
        sums = list(sums)
        begin = simd.offset(builder, first, step, simd.i64(STEP_INPUTS))
        codes = [_load_fours(builder, inputs.tags, each) for each in codes_at]
        for index, of_panels in enumerate(zip(*codes, strict=True)):
            for row, address in enumerate(row_at):
                at = builder.add(builder.add(address, begin), simd.i64(4 * index))
                some = splat_bits(builder, simd.load(builder, at, simd.I32, 4))
                for panel, each in enumerate(of_panels):
                    cell = row * num_panels + panel
                    sums[cell] = multiply_accumulate(builder, operand_tag, sums[cell], some, each)
        return sums

    sums = inputs.loop(group, initial, of_step)
    headers = inputs.headers(group)
    for index, (integers, cell) in enumerate(zip(sums, cells, strict=True)):
        row, panel = divmod(index, num_panels)
        total = simd.load(builder, cell, simd.VF32, 4)
        total = _scaled(builder, integers, numbers_at[row], headers[panel], total)
        simd.store(builder, total, cell, 4)


def _load_fours(builder, tags, at):
    """Two vectors of four inputs of each of sixteen outputs, in bytes."""
    first = simd.load(builder, at, simd.VI32, 64)
    if not tags.four_bits:
        return first, simd.load(builder, builder.add(at, simd.i64(64)), simd.VI32, 64)
    mask = simd.repeated(0x0F0F0F0F)
    return builder.and_(first, mask), builder.and_(builder.lshr(first, simd.repeated(4)), mask)


def _scaled(builder, integers, numbers_at, header, total):
    """total + scales of weights and row * integers + minimums * the row's sum."""
    product = builder.sitofp(builder.bitcast(integers, simd.VI32), simd.VF32)
    scale = simd.splat(builder, simd.load(builder, numbers_at, simd.F32, 4))
    total = fma(builder, builder.fmul(product, scale), header.scales, total)
    if header.minimums is None:
        return total
    sum_at = builder.add(numbers_at, simd.i64(4))
    row_sum = simd.splat(builder, simd.load(builder, sum_at, simd.F32, 4))
    return fma(builder, row_sum, header.minimums, total)
