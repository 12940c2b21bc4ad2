"""Fuses the residual sums of decoder layers with the normalizations after them, on GPUs.

A layer adds the outputs of its attention, and those of its MLP, to its hidden states, and the sum
is normalized next: in the same layer, in the layer after it, or behind the last layer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import STEP_KEYWORD
from gpu_worker.model.fusion.gpu_layers import TritonRMSNorm
from gpu_worker.model.fusion.module_matching import close, random_rows

_NUM_TOKENS = 3


class SummingLayer:
    """The forward pass of a decoder layer, with its two sums in the launches of normalizations.

    Args:
        layer: with the names that transformers uses.
        next_norm: of its outputs.
    """

    def __init__(self, layer: Any, next_norm: TritonRMSNorm) -> None:
        self._layer = layer
        self._next_norm = next_norm
        self._has_inner_norms = hasattr(layer, "pre_feedforward_layernorm")

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden]
        **others: Any,
    ) -> torch.Tensor:
        """Hidden states [1, T, hidden], whose normalized rows ``next_norm`` has ready."""
        layer = self._layer
        normalized = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normalized, **others)
        norm = layer.post_attention_layernorm
        if self._has_inner_norms:  # outputs are normalized before they are added, as in Gemma 2
            attended, norm = norm(attended), layer.pre_feedforward_layernorm
        hidden_states, normalized = norm.of_sum(attended, hidden_states)
        output = layer.mlp(normalized)
        if self._has_inner_norms:
            output = layer.post_feedforward_layernorm(output)
        return self._next_norm.sum_ahead(output, hidden_states)


def fuse_sums(model: nn.Module) -> int:
    """Fuse the sums of all layers of a model that stays the same; returns their number.

    Args:
        model: of transformers, whose normalizations are fused already.
    """
    candidates = list(_candidates(model))
    if not candidates:
        return 0
    layers = [layer for layer, _ in candidates]
    calls = _calls(model, layers)
    fused = [SummingLayer(layer, norm) for layer, norm in candidates]
    if not all(
        _same(layer, other, norm, calls.get(layer))
        for (layer, norm), other in zip(candidates, fused, strict=True)
    ):
        return 0
    for layer, other in zip(layers, fused, strict=True):
        layer.forward = other
    return len(fused)


def _candidates(model: nn.Module) -> Iterator[tuple[Any, TritonRMSNorm]]:
    """Decoder layers, and the normalizations that come after them."""
    for parent in model.modules():
        layers, last = getattr(parent, "layers", None), getattr(parent, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(last, TritonRMSNorm):
            continue
        norms = [getattr(layer, "input_layernorm", None) for layer in layers]
        own = [getattr(layer, "post_attention_layernorm", None) for layer in layers]
        parts = all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers)
        if parts and all(isinstance(norm, TritonRMSNorm) for norm in (*norms, *own)):
            yield from zip(layers, [*norms[1:], last], strict=True)


def _calls(model: nn.Module, layers: list[Any]) -> dict[nn.Module, dict[str, Any]]:
    """What each layer is called with beside hidden states, in a pass over a few tokens."""
    found: dict[nn.Module, dict[str, Any]] = {}

    def record(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(given) == 1:
            found[layer] = named

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        probe(model)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def probe(model: nn.Module) -> None:
    """Run a model of transformers on a few tokens, with sums in the place of attention."""
    device = next(model.parameters()).device
    model(
        input_ids=torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device=device),
        position_ids=torch.arange(_NUM_TOKENS, device=device)[None],
        use_cache=False,
        **{STEP_KEYWORD: _Sums()},
    )


class _Sums:
    """Sums of queries, keys and values in the place of attention."""

    def attend(self, _layer: nn.Module, *inputs: Any) -> torch.Tensor:
        query, key, value, params = inputs
        summed: torch.Tensor = (query + (key + value).mean(1, keepdim=True)) * params.scale
        return summed


def _same(
    layer: Any, fused: SummingLayer, norm: TritonRMSNorm, named: dict[str, Any] | None
) -> bool:
    """Whether both return the same for random rows, and the same after the next normalization."""
    if named is None:
        return False
    weight: torch.Tensor = next(layer.parameters())
    width = len(layer.input_layernorm.weight)
    rows = random_rows((1, _NUM_TOKENS, width), weight.dtype, weight.device)
    expected = layer(rows, **named)
    try:
        found = fused(rows, **named)
    except (AttributeError, TypeError, ValueError):  # it has other parts
        return False
    return close(found, expected) and close(norm(found), norm(expected))
