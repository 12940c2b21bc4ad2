"""Products with dequantized weights in float32, in LLVM IR.

Weights are dequantized in registers, to the very numbers that ``QuantizedWeight.dequantize`` gives.
From there on everything is as in ``linear_ir``, so that a layer has the bits of one in float32
whose weights were dequantized at load.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.linear_arguments import GROUP
from kernels.cpu.linear.linear_ir import multiply_elements
from kernels.cpu.quantized.packed_format import STEP_INPUTS
from kernels.cpu.quantized.quantized_ir import Tags, load_header
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.bf16_dot import fma
from kernels.cpu.runtime.simd import LANES

_VI8 = ir.VectorType(ir.IntType(8), LANES)
_VECTOR_BYTES = 4 * LANES


def _load_weights(builder, tags, header, at):
    """Eight inputs of sixteen outputs."""
    if tags.four_bits:
        lanes = simd.load(builder, at, simd.VI32, 4)
        codes = []
        for left in range(28, -4, -4):
            high = builder.shl(lanes, simd.repeated(left)) if left else lanes
            codes.append(builder.ashr(high, simd.repeated(28)))
    else:
        places = [builder.add(at, simd.i64(LANES * vector)) for vector in range(STEP_INPUTS)]
        codes = [builder.sext(simd.load(builder, each, _VI8, 1), simd.VI32) for each in places]
    found = []
    for each in codes:
        code = builder.sitofp(each, simd.VF32)
        if header.minimums is None:
            found.append(builder.fmul(code, header.scales))
        elif tags.scales == types.float32:
            found.append(builder.fadd(builder.fmul(code, header.scales), header.minimums))
        else:  # the product needs no rounding
            found.append(fma(builder, code, header.scales, header.minimums))
    return found


def add_floats(builder, inputs, group, row_at, sums):
    """Sums plus the products of a group of inputs; rows and sums are float32."""
    headers, first = inputs.headers(group), inputs.first_step(group)

    def of_step(step, codes_at, sums):
        weights = [
            _load_weights(builder, inputs.tags, header, at)
            for header, at in zip(headers, codes_at, strict=True)
        ]
        begin = builder.mul(builder.add(first, step), simd.i64(4 * STEP_INPUTS))
        for index, of_panels in enumerate(zip(*weights, strict=True)):
            place = builder.add(begin, simd.i64(4 * index))
            sums = multiply_elements(
                builder, sums, [builder.add(row, place) for row in row_at], of_panels
            )
        return sums

    return inputs.loop(group, sums, of_step)


@intrinsic(prefer_literal=True)
def dequantize_panels(
    typingctx, weight_tag, vectors, header, codes, panel, steps, target, t_stride
):
    """Dequantize 8 * ``steps`` inputs of one group, in ``vectors`` panels from ``panel`` on.

    They are written in the order of unquantized float32 weights (see weight_packing); ``t_stride``
    is the distance from panel to panel. ``header`` is the address of the group's scales, ``codes``
    that of the first inputs' codes.
    """
    num_vectors = vectors.literal_value

    def codegen(context, builder, signature, args):
        _, _, header_at, codes, panel, steps, target, t_stride = args
        tags = Tags(*signature.args[0].types)
        panels = [builder.add(panel, simd.i64(index)) for index in range(num_vectors)]
        headers = [load_header(builder, tags, header_at, each) for each in panels]
        targets = [simd.offset(builder, target, each, t_stride) for each in panels]
        step_bytes = simd.i64(GROUP * tags.step_bytes)

        def of_step(step, _):
            code_at = simd.offset(builder, codes, step, step_bytes)
            for index, header, out in zip(panels, headers, targets, strict=True):
                at = simd.offset(builder, code_at, index, simd.i64(tags.step_bytes))
                out_at = simd.offset(builder, out, step, simd.i64(_VECTOR_BYTES * STEP_INPUTS))
                for weights in _load_weights(builder, tags, header, at):
                    simd.store(builder, weights, out_at, 64)
                    out_at = builder.add(out_at, simd.i64(_VECTOR_BYTES))
            return []

        simd.loop(builder, steps, [], of_step)

    return types.void(weight_tag, vectors, *(types.int64,) * 6), codegen
