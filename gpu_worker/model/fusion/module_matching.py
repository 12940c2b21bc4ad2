"""Finds layers of a loaded model, and compares them with what is to replace them.

Layers are found by the names and types that transformers uses. A name alone does not make a layer:
all but plain linear layers are compared on random rows before they are replaced.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpu_worker.model.quantization.quantized_linear import QuantizedLinear

QKV = ("q_proj", "k_proj", "v_proj")
"""Linear layers of attention that share their input."""

MLP = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of a gated MLP."""

JOINED_MLP = ("gate_up_proj", "down_proj")
"""The same, where gate and up are one layer."""

_PROBE_ROWS = 3
# Differences that rounding explains, as shares of an output plus the spread of all outputs.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# The same where inputs are rounded to 8 bits on the way: a difference in the last digit before may
# be one step of them.
_TOLERANCE_OF_STEPS = 0.12

Place = tuple[nn.Module, str, nn.Module]
"""A module's parent, its name there, and itself."""


def places(model: nn.Module) -> list[Place]:
    """Every module in its place; modules may be replaced meanwhile."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def reads_weights(module: nn.Module) -> bool:
    """Whether a module's code reads a ``weight``, maybe a child's, which must then stay."""
    forward = inspect.unwrap(type(module).forward)
    return "weight" in getattr(getattr(forward, "__code__", None), "co_names", ())


def linears_of(
    module: nn.Module, names: tuple[str, ...], kind: type[nn.Module]
) -> list[Any] | None:
    """The children of these names, if all exist and are linear layers of one kind and dtype."""
    found: list[Any] = []
    for name in names:
        child = getattr(module, name, None)
        if type(child) is not kind:
            return None
        found.append(child)
    dtypes = {linear.weight.dtype for linear in found if isinstance(linear, nn.Linear)}
    return found if len(dtypes) <= 1 else None


def gated_linears(module: nn.Module, kind: type[nn.Module]) -> list[Any] | None:
    """Gate, up and down of an MLP without other parts, gate and up of one shape."""
    linears = linears_of(module, MLP, kind)
    if linears is None:
        return None
    others = {child for child, _ in module.named_children()} - {*MLP, "act_fn"}
    gate, up, _ = linears
    shapes = {(each.in_features, each.out_features, each.bias is None) for each in (gate, up)}
    return linears if len(shapes) == 1 and not others else None


def joined_gated_linears(module: nn.Module, kind: type[nn.Module]) -> list[Any] | None:
    """The same of an MLP whose gate and up are the halves of one layer, as views of its weight."""
    linears = linears_of(module, JOINED_MLP, kind)
    if linears is None or linears[0].out_features % 2:
        return None
    others = {child for child, _ in module.named_children()} - {*JOINED_MLP, "activation_fn"}
    joined, down = linears
    return None if others else [*_halves(joined), down]


def _halves(linear: nn.Linear | QuantizedLinear) -> list[nn.Module]:
    """Layers of the first and of the second half of its outputs."""
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    if isinstance(linear, QuantizedLinear):
        half = linear.out_features // 2
        weights = [linear.quantized.rows(begin, begin + half) for begin in (0, half)]
        return [QuantizedLinear(each, bias) for each, bias in zip(weights, biases, strict=True)]
    found: list[Any] = []
    for weight, bias in zip(linear.weight.chunk(2), biases, strict=True):
        part: Any = nn.Linear(linear.in_features, len(weight), bias=False, device="meta")
        part.weight = nn.Parameter(weight, requires_grad=False)
        part.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        found.append(part)
    return found


def norm_factors(module: nn.Module) -> tuple[float, Iterator[torch.Tensor]] | None:
    """Epsilon of an RMS normalization by name, and its possible factors [K] float32."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    plain = weight.detach().float()
    return epsilon, iter((plain.clone(), 1 + plain))


def layer_norm_terms(module: nn.Module) -> tuple[float, torch.Tensor, torch.Tensor] | None:
    """Epsilon, weight and bias of a normalization by mean and variance, found by name.

    Weight and bias are [K] float32; ones and zeros where the module has none.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    shape = getattr(module, "normalized_shape", getattr(weight, "shape", ()))
    if not type(module).__name__.endswith("LayerNorm") or not isinstance(epsilon, float):
        return None
    if len(shape) != 1 or any(each is not None and each.shape != shape for each in (weight, bias)):
        return None
    weight = torch.ones(shape) if weight is None else weight.detach().float().clone()
    return epsilon, weight, torch.zeros(shape) if bias is None else bias.detach().float().clone()


def agrees(
    own: Callable[..., Any],
    other: Callable[..., Any],
    num_features: int,
    dtype: torch.dtype,
    device: torch.device,
    mean: float = 0.0,
) -> bool:
    """Whether both return the same for random rows of this mean, up to rounding."""
    rows = random_rows((1, _PROBE_ROWS, num_features), dtype, device) + mean
    try:
        expected = own(rows)
    except (IndexError, RuntimeError, TypeError, ValueError):  # it takes other arguments
        return False
    return close(other(rows), expected, _rounds_inputs(own))


def _rounds_inputs(own: Callable[..., Any]) -> bool:
    """Whether a module rounds inputs of linear layers to 8 bits."""
    parts = own.modules() if isinstance(own, nn.Module) else ()
    return any(isinstance(each, QuantizedLinear) and each.rounds_inputs for each in parts)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers, the same in every call with the same shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def close(found: Any, expected: Any, by_steps: bool = False) -> bool:
    """Whether two results are tensors of one shape and dtype that differ by rounding alone.

    Args:
        by_steps: inputs are rounded to 8 bits on the way.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.float() - expected.float()).abs()
    # A normalization may have few large weights among small ones: then the rounding of its largest
    # outputs exceeds the spread.
    size = expected.float().abs() + expected.float().std().clamp_min(1e-12)
    tolerance = _TOLERANCE_OF_STEPS if by_steps else _TOLERANCE[expected.dtype]
    return bool((difference < tolerance * size).all())
