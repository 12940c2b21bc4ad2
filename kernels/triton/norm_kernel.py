"""The Triton kernels of root-mean-square normalization."""

import triton
import triton.language as tl


@triton.jit
def _normalized(values, factor, epsilon, place, there, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """values / sqrt(mean(values^2) + epsilon) * factor, [K'] float32."""
    mean = tl.sum(values * values, 0) / WIDTH
    scaled = values * (1.0 / tl.sqrt(mean + epsilon))  # [K']
    return scaled * tl.load(factor + place, mask=there, other=0.0)


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
    scaled = _normalized(values, factor, epsilon, place, there, WIDTH)  # [K']
    tl.store(out + row * WIDTH + place, scaled.to(out.dtype.element_ty), mask=there)


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [T, K]
    residual,  # [T, K]
    total,  # [T, K], contiguous
    out,  # [T, K], contiguous
    factor,  # [K] float32
    epsilon,
    row_stride,
    residual_stride,
    WIDTH: tl.constexpr,  # K
    PADDED_WIDTH: tl.constexpr,  # K rounded up to a power of two
):
    """One row: total = x + residual, rounded as it is stored, and its norm. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_WIDTH)  # [K']
    there = place < WIDTH  # [K']
    values = tl.load(x + row * row_stride + place, mask=there, other=0.0).to(tl.float32)  # [K']
    before = residual + row * residual_stride  # [K]
    values += tl.load(before + place, mask=there, other=0.0).to(tl.float32)
    stored = values.to(total.dtype.element_ty)  # [K']
    tl.store(total + row * WIDTH + place, stored, mask=there)
    scaled = _normalized(stored.to(tl.float32), factor, epsilon, place, there, WIDTH)  # [K']
    tl.store(out + row * WIDTH + place, scaled.to(out.dtype.element_ty), mask=there)
