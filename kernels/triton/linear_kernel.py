"""The Triton kernel of linear layers whose rows do not depend on each other."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], not read without one
    out,  # [T, N], contiguous
    num_rows,  # T
    row_stride,
    weight_out_stride,
    weight_in_stride,
    IN_FEATURES: tl.constexpr,  # K
    OUT_FEATURES: tl.constexpr,  # N
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, for the interpreter, whose bf16 dot is wrong
):
    """One tile of outputs of one tile of rows, summed over all inputs in their order, in float32.

    Tiles are the same for every T, and no sum is cut: so a row's bits are its own. Grid: (tiles
    of N, tiles of T).
    """
    row = (tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)  # [T']
    output = (tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)).to(tl.int64)  # [N']
    has_row = row < num_rows  # [T']
    has_output = output < OUT_FEATURES  # [N']
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)  # [T', N']
    for first in range(0, IN_FEATURES, TILE_INPUTS):
        place = first + tl.arange(0, TILE_INPUTS)  # [K']
        has_place = place < IN_FEATURES  # [K']
        inputs = tl.load(
            x + row[:, None] * row_stride + place[None, :],
            mask=has_row[:, None] & has_place[None, :],
            other=0.0,
        )  # [T', K']
        weights = tl.load(
            weight + output[None, :] * weight_out_stride + place[:, None] * weight_in_stride,
            mask=has_output[None, :] & has_place[:, None],
            other=0.0,
        )  # [K', N']
        if UPCAST:
            inputs = inputs.to(tl.float32)
            weights = weights.to(tl.float32)
        sums = tl.dot(inputs, weights, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * OUT_FEATURES + output[None, :],
        sums.to(out.dtype.element_ty),
        mask=has_row[:, None] & has_output[None, :],
    )
