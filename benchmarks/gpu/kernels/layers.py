"""Measures the kernels around attention in a layer, against torch's operations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.kernels.cases import LayerSizes
from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.kernels.report import Baseline, Row

# Several times an H200's L2 cache, so that inputs are not cached.
_ROTATED_BYTES = 256 * 2**20
_LARGEST_ERROR = 0.02  # relative to the largest element: rounding of 16-bit inputs and outputs
_EPSILON = 1e-5

Tensors = tuple[torch.Tensor, ...]
Function = Callable[[torch.Tensor], Tensors]


@dataclass(frozen=True, slots=True)
class _Case:
    """One operation of a layer: ours, torch's, and the bytes that both access besides the input."""

    name: str
    width: int  # elements of a row of the input
    ours: Function
    theirs: Function
    other_elements: int


def measure_layers(
    clock: Clock, sizes: LayerSizes, num_rows: int, device: torch.device, ceiling: float
) -> Iterator[Row]:
    """Measure normalization, gate, rotary embeddings and a linear layer of independent rows.

    Raises:
        RuntimeError: an output is wrong.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    for case in _cases(sizes, num_rows, dtype, device):
        work = dtype.itemsize * (num_rows * case.width + case.other_elements)
        copies = 1 + _ROTATED_BYTES // work if device.type == "cuda" else 1
        inputs = [torch.randn(num_rows, case.width, device=device).to(dtype) for _ in range(copies)]
        error = _error(case.ours(inputs[0]), case.theirs(inputs[0]))
        if not error <= _LARGEST_ERROR:
            raise RuntimeError(f"{case.name}: differs from torch's by {error:.2g}")
        ours = clock.time([partial(case.ours, x) for x in inputs])
        theirs = clock.time([partial(case.theirs, x) for x in inputs])
        baseline = Baseline("torch", theirs, error)
        name = f"{case.name}, {num_rows} rows"
        yield Row(name, ours, work, "bytes", ceiling, baselines=(baseline,))


def _cases(
    sizes: LayerSizes, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[_Case]:
    from kernels.triton import layers

    hidden, inner, dim = sizes.hidden, sizes.intermediate, sizes.head_dim
    factor = torch.randn(hidden, device=device).to(dtype)
    wide = factor.float()
    yield _Case(
        f"RMS norm of {hidden}",
        hidden,
        lambda x: (layers.rms_norm(x, wide, _EPSILON),),
        lambda x: (_norm(x, factor),),
        num_rows * hidden,
    )
    yield _Case(
        f"silu(gate) * up of {inner}",
        2 * inner,
        lambda x: (layers.silu_gate(x),),
        lambda x: (functional.silu(x[:, :inner]) * x[:, inner:],),
        num_rows * inner,
    )
    cos, sin = torch.randn(2, num_rows, dim, device=device).to(dtype)
    heads, both = sizes.num_heads, sizes.num_heads + sizes.num_kv_heads

    def rotate(x: torch.Tensor) -> Tensors:
        rows = x.view(num_rows, both, dim)
        return layers.rotate(rows[:, :heads], rows[:, heads:], cos, sin)

    def rotate_in_torch(x: torch.Tensor) -> Tensors:
        rows = x.view(num_rows, both, dim)
        return _rotate(rows[:, :heads], cos, sin), _rotate(rows[:, heads:], cos, sin)

    yield _Case(
        f"rotary embeddings of {sizes.num_heads} + {sizes.num_kv_heads} heads of {dim}",
        both * dim,
        rotate,
        rotate_in_torch,
        num_rows * (both + 2) * dim,
    )
    matrix = (torch.randn(inner, hidden, device=device) * hidden**-0.5).to(dtype)
    yield _Case(
        f"linear layer of independent rows, {hidden} to {inner}",
        hidden,
        lambda x: (layers.linear(x, matrix, None),),
        lambda x: (functional.linear(x, matrix),),
        matrix.numel() + num_rows * inner,
    )


def _norm(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
    return factor * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def _error(ours: Tensors, theirs: Tensors) -> float:
    """Largest difference over the largest element."""
    return max(
        float((own.float() - other.float()).abs().max() / other.float().abs().max())
        for own, other in zip(ours, theirs, strict=True)
    )
