"""The Triton kernel of silu(gate) * up, between the two matrix products of a gated MLP."""

import triton
import triton.language as tl


@triton.jit
def silu_gate_kernel(  # type: ignore[no-untyped-def]
    gate_up,  # [T, 2 * N], the gate's outputs and then up's
    out,  # [T, N], contiguous
    row_stride,
    WIDTH: tl.constexpr,  # N
    TILE_WIDTH: tl.constexpr,
):
    """One tile of a row: silu(gate) * up, in float32. Grid: (T, tiles of N)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)  # [N']
    there = place < WIDTH  # [N']
    start = gate_up + row * row_stride
    gate = tl.load(start + place, mask=there, other=0.0).to(tl.float32)  # [N']
    up = tl.load(start + WIDTH + place, mask=there, other=0.0).to(tl.float32)  # [N']
    power = tl.exp(0.0 - tl.abs(gate))  # [N'], never overflows
    gated = gate * tl.where(gate < 0.0, power, 1.0) / (1.0 + power) * up  # [N']
    tl.store(out + row * WIDTH + place, gated.to(out.dtype.element_ty), mask=there)
