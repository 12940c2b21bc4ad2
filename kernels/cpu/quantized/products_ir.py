"""Products of rows and quantized weights in LLVM IR, group after group of inputs."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.linear_ir import row_addresses, sum_addresses
from kernels.cpu.quantized.float_products_ir import add_floats
from kernels.cpu.quantized.integer_products_ir import add_integers
from kernels.cpu.quantized.quantized_ir import InputGroups, Tags
from kernels.cpu.runtime import simd


@intrinsic(prefer_literal=True)
def accumulate_quantized(
    typingctx,
    weight_tag,
    operand_tag,
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

    A register block is ``rows`` x ``vectors`` * 16; out [rows, .] is float32, and so is ``x``, or
    its rows are rounded (see input_rounding_ir), as the operand tag says. Rows beyond ``last``
    repeat it. ``w`` is the address of the first group of inputs, ``panel`` the index of the first
    panel in it. Weights are prefetched a little before they are read.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, _, _, last, x, x_stride, w, panel, groups, steps, out, o_stride = args
        operand_tag = signature.args[1]
        panels = [builder.add(panel, simd.i64(index)) for index in range(num_vectors)]
        inputs = InputGroups(builder, Tags(*signature.args[0].types), w, panels, groups, steps)
        row_at = row_addresses(builder, last, num_rows, x, x_stride)
        cells = sum_addresses(builder, num_rows, num_vectors, out, o_stride)

        if operand_tag != types.float32:

            def of_group(group, _):
                add_integers(builder, operand_tag, inputs, group, row_at, cells)
                return []

            simd.loop(builder, groups, [], of_group)
            return
        initial = [simd.load(builder, cell, simd.VF32, 4) for cell in cells]
        sums = simd.loop(
            builder,
            groups,
            initial,
            lambda group, sums: add_floats(builder, inputs, group, row_at, sums),
        )
        for cell, total in zip(cells, sums, strict=True):
            simd.store(builder, total, cell, 4)

    numbers = (types.int64,) * 9
    return types.void(weight_tag, operand_tag, rows, vectors, *numbers), codegen
