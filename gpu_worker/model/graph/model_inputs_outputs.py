"""Finds a model's input and output layers in a pass over two tokens (CPU)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.fusion.cpu_layers import FusedNorm, PackedLinear
from gpu_worker.model.graph.torch_capture import CannotCapture
from gpu_worker.model.ragged_model import RaggedModel
from kernels.interface import AttentionParams


@dataclass(frozen=True, slots=True)
class InputOutputLayers:
    """The only modules before a model's first decoder layer, and behind its last one."""

    embedding: nn.Module
    norm: nn.Module
    head: nn.Module
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    output: Any


class NoAttention:
    """A step whose attention returns zeros."""

    def attend(
        self,
        layer: nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
        params: AttentionParams,  # noqa: ARG002
    ) -> torch.Tensor:
        return torch.zeros_like(query)


def find_input_output_layers(model: RaggedModel, layers: nn.ModuleList) -> InputOutputLayers:
    """The embedding, the last normalization and the output layer.

    Raises:
        CannotCapture: the model computes something else, or may do so.
    """
    calls = _observe(model, layers)
    token_ids, rows = torch.arange(2), torch.tensor([1])
    own = {*layers, *(module for layer in layers for module in layer.modules())}
    outside = [call for call in calls if call.module not in own and len(call.args) == 1]
    first = next(call for call in calls if call.module is layers[0])
    last = next(call for call in calls if call.module is layers[-1])
    result = calls[-1]  # the model's own

    embedding = _only(
        "embeddings are not all that the first layer gets",
        [
            call
            for call in outside
            if call.output is first.args[0] and _same(call.args[0], token_ids.unsqueeze(0))
        ],
    )
    norm = _only(
        "its last layer's outputs are not just normalized",
        [call for call in outside if call.args[0] is last.output],
    )
    head = _only(
        "its logits are not just those of an output layer",
        [call for call in outside if call.output is getattr(result.output, "logits", None)],
    )
    if not isinstance(norm.module, FusedNorm) or not isinstance(head.module, PackedLinear):
        raise CannotCapture("the last normalization or the output layer is not compiled")
    if not any(_same(head.args[0], x) for x in (norm.output, norm.output[:, rows])):
        raise CannotCapture("something is computed before its output layer")
    return InputOutputLayers(embedding.module, norm.module, head.module, head.output.shape[-1])


def _observe(model: RaggedModel, layers: nn.ModuleList) -> list[_Call]:
    """Calls of modules without keyword arguments, and of layers, in the order of their returns."""
    calls: list[_Call] = []

    def returned(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not kwargs or module in layers or module is model.model:
            calls.append(_Call(module, args, output))

    hooks = [
        module.register_forward_hook(returned, with_kwargs=True) for module in model.model.modules()
    ]
    try:
        positions = torch.arange(2)
        model.forward(torch.arange(2), positions, NoAttention(), rows=torch.tensor([1]))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _only(otherwise: str, found: Sequence[_Call]) -> _Call:
    if len(found) != 1:
        raise CannotCapture(otherwise)
    return found[0]


def _same(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)
