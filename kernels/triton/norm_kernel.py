"""The Triton kernel of root-mean-square normalization."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_inner"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [A, B, K]
    out,  # [A, B, K], contiguous
    factor,  # [K] float32
    epsilon,
    num_inner,  # B
    outer_stride,
    inner_stride,
    WIDTH: tl.constexpr,  # K
    PADDED_WIDTH: tl.constexpr,  # K rounded up to a power of two
):
    """One row: x / sqrt(mean(x^2) + epsilon) * factor, in float32. Grid: (A * B,)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_WIDTH)  # [K']
    there = place < WIDTH  # [K']
    start = row // num_inner * outer_stride + row % num_inner * inner_stride
    values = tl.load(x + start + place, mask=there, other=0.0).to(tl.float32)  # [K']
    mean = tl.sum(values * values, 0) / WIDTH
    scaled = values * (1.0 / tl.sqrt(mean + epsilon))  # [K']
    scaled *= tl.load(factor + place, mask=there, other=0.0)
    tl.store(out + row * WIDTH + place, scaled.to(out.dtype.element_ty), mask=there)
