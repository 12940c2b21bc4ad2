"""The operations around attention on GPUs, in one launch each: checks and launches."""

from dataclasses import dataclass

import torch
import triton

from kernels.checks import check_rotary
from kernels.triton.gate_kernel import silu_gate_kernel
from kernels.triton.linear_kernel import linear_kernel
from kernels.triton.norm_kernel import add_rms_norm_kernel, rms_norm_kernel
from kernels.triton.rotary_kernel import rotate_kernel
from kernels.triton.tiles import interpreting

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types of inputs and outputs; everything is computed in float32."""

GATE_TILE = 1024  # outputs
ROTARY_TILE = 8  # heads
ROTARY_WARPS = 2  # few, so that a thread loads sixteen bytes at once
_LARGEST_ROW = 32_768  # elements, which one program keeps in registers
_ELEMENTS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Shape of a tile of the linear kernel, and how many threads and stages work on it."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def linear_tile(dtype: torch.dtype) -> LinearTile:
    """The one tile for all numbers of rows: another one would round a row's sums differently."""
    if dtype == torch.float32:  # multiplied without tensor cores, to keep its precision
        return LinearTile(32, 64, 32, 4, 3)
    return LinearTile(64, 64, 64, 4, 4)


def norm_warps(width: int) -> int:
    """Warps for a row of so many elements."""
    wanted: int = triton.next_power_of_2(width) // _ELEMENTS_PER_WARP
    return min(16, max(1, wanted))


def can_norm(width: int) -> bool:
    """Whether rows of so many elements can be normalized."""
    return width <= _LARGEST_ROW


def rms_norm(
    x: torch.Tensor,  # [..., K]
    factor: torch.Tensor,  # [K] float32
    epsilon: float,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * factor over the last dimension, [..., K].

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    width = x.shape[-1]
    _check_factor(factor, width)
    _require_dtype(x)
    if x.stride(-1) != 1:
        x = x.contiguous()
    # The heads of one token are views into a longer row: two strides save a copy.
    rows = x.flatten(0, -3) if x.dim() > 2 else x.reshape(1, -1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
            rows,
            out,
            factor,
            epsilon,
            rows.shape[1],
            *rows.stride()[:2],
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            num_warps=norm_warps(width),
        )
    return out


def add_rms_norm(
    x: torch.Tensor,  # [..., K]
    residual: torch.Tensor,  # [..., K]
    factor: torch.Tensor,  # [K] float32
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, [..., K], and its ``rms_norm``.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    width = x.shape[-1]
    _check_factor(factor, width)
    _require_dtype(x)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        given = f"{tuple(residual.shape)} of {residual.dtype}"
        raise ValueError(f"residual {given} for {tuple(x.shape)} of {x.dtype}")
    rows, before = (_rows(each, width) for each in (x, residual))
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        add_rms_norm_kernel[(rows.shape[0],)](
            rows,
            before,
            total,
            out,
            factor,
            epsilon,
            rows.stride(0),
            before.stride(0),
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            num_warps=norm_warps(width),
        )
    return total, out


def silu_gate(
    gate_up: torch.Tensor,  # [..., 2 * N]
) -> torch.Tensor:
    """silu(gate) * up, [..., N], of a gate's outputs that are followed by up's.

    Raises:
        ValueError: of another type, or of an odd width.
    """
    _require_dtype(gate_up)
    width, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        raise ValueError(f"{tuple(gate_up.shape)} are no halves")
    rows = _rows(gate_up, 2 * width)
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(width, GATE_TILE))
        silu_gate_kernel[grid](
            rows, out, rows.stride(0), WIDTH=width, TILE_WIDTH=GATE_TILE, num_warps=4
        )
    return out


def rotate(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, Hkv, D]
    cos: torch.Tensor,  # [T, D]
    sin: torch.Tensor,  # [T, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embeddings of queries [T, H, D] and keys [T, Hkv, D].

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    check_rotary(query, key, cos, sin)
    _require_dtype(query)
    num_tokens, num_heads, head_dim = query.shape
    if cos.shape[1] != head_dim:
        raise ValueError(f"cos {tuple(cos.shape)}: all of D {head_dim} must be rotated")
    num_kv_heads = key.shape[1]
    query_out = query.new_empty(query.shape)
    key_out = key.new_empty(key.shape)
    if num_tokens:
        tiles = triton.cdiv(num_heads, ROTARY_TILE) + triton.cdiv(num_kv_heads, ROTARY_TILE)
        rotate_kernel[(num_tokens, tiles)](
            query,
            key,
            query_out,
            key_out,
            cos,
            sin,
            *query.stride()[:2],
            *key.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_HALF=triton.next_power_of_2(head_dim // 2),
            TILE_HEADS=ROTARY_TILE,
            num_warps=ROTARY_WARPS,
        )
    return query_out, key_out


def linear(
    x: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K], of any strides
    bias: torch.Tensor | None,  # [N]
) -> torch.Tensor:
    """x @ weight.T + bias, [..., N]; a row has the same bits in every batch.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    out_features, in_features = weight.shape
    fits = x.shape[-1] == in_features and (bias is None or bias.shape == (out_features,))
    if not fits or weight.dtype != x.dtype:
        raise ValueError(f"input {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)}")
    _require_dtype(x)
    rows = _rows(x, in_features)
    out = x.new_empty((*x.shape[:-1], out_features))
    if out.numel():
        tile = linear_tile(x.dtype)
        grid = (triton.cdiv(out_features, tile.outputs), triton.cdiv(rows.shape[0], tile.rows))
        linear_kernel[grid](
            rows,
            weight,
            weight if bias is None else bias,
            out,
            rows.shape[0],
            rows.stride(0),
            *weight.stride(),
            IN_FEATURES=in_features,
            OUT_FEATURES=out_features,
            HAS_BIAS=bias is not None,
            TILE_ROWS=tile.rows,
            TILE_OUTPUTS=tile.outputs,
            TILE_INPUTS=tile.inputs,
            UPCAST=interpreting() and x.dtype == torch.bfloat16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    return out


def _require_dtype(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{x.dtype} is not served")


def _check_factor(factor: torch.Tensor, width: int) -> None:
    if factor.shape != (width,) or factor.dtype != torch.float32 or not factor.is_contiguous():
        raise ValueError(f"factor {tuple(factor.shape)} of {factor.dtype} for rows of {width}")


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """Contiguous rows [T, width] of any distance."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()
