"""What a model computes around its decoder layers, seen in a pass over two tokens (CPU)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.fusion.cpu_layers import FusedNorm, PackedLinear
from gpu_worker.model.graph.torch_capture import CannotRecord
from gpu_worker.model.ragged_model import RaggedModel
from kernels.interface import AttentionParams


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Modules that are all there is before the first layer and behind the last one."""

    embedding: nn.Module
    norm: nn.Module
    head: nn.Module
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    output: Any


class NothingAttended:
    """A step that attends to nothing."""

    def attend(
        self,
        layer: nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
        params: AttentionParams,  # noqa: ARG002
    ) -> torch.Tensor:
        return torch.zeros_like(query)


def find_surroundings(model: RaggedModel, layers: nn.ModuleList) -> Surroundings:
    """The embedding, the last normalization and the output layer.

    Raises:
        CannotRecord: there is something else, or not known to be nothing else.
    """
    calls = _observe(model, layers)
    token_ids, rows = torch.arange(2), torch.tensor([1])
    own = {*layers, *(module for layer in layers for module in layer.modules())}
    outside = [call for call in calls if call.module not in own and len(call.args) == 1]
    first = next(call for call in calls if call.module is layers[0])
    last = next(call for call in calls if call.module is layers[-1])
    result = calls[-1]  # the model's own

    embedding = _the_one(
        "embeddings are not all that the first layer gets",
        [
            call
            for call in outside
            if call.output is first.args[0] and _same(call.args[0], token_ids.unsqueeze(0))
        ],
    )
    norm = _the_one(
        "its last layer's outputs are not just normalized",
        [call for call in outside if call.args[0] is last.output],
    )
    head = _the_one(
        "its logits are not just those of an output layer",
        [call for call in outside if call.output is getattr(result.output, "logits", None)],
    )
    if not isinstance(norm.module, FusedNorm) or not isinstance(head.module, PackedLinear):
        raise CannotRecord("the last normalization or the output layer is not compiled")
    if not any(_same(head.args[0], x) for x in (norm.output, norm.output[:, rows])):
        raise CannotRecord("something is computed before its output layer")
    return Surroundings(embedding.module, norm.module, head.module, head.output.shape[-1])


def _observe(model: RaggedModel, layers: nn.ModuleList) -> list[_Call]:
    """All calls of modules without keyword arguments, and of layers, in the order they return."""
    calls: list[_Call] = []

    def returned(
        module: nn.Module, args: tuple[Any, ...], others: dict[str, Any], output: Any
    ) -> None:
        if not others or module in layers or module is model.model:
            calls.append(_Call(module, args, output))

    hooks = [
        module.register_forward_hook(returned, with_kwargs=True) for module in model.model.modules()
    ]
    try:
        positions = torch.arange(2)
        model.forward(torch.arange(2), positions, NothingAttended(), rows=torch.tensor([1]))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _the_one(otherwise: str, found: Sequence[_Call]) -> _Call:
    if len(found) != 1:
        raise CannotRecord(otherwise)
    return found[0]


def _same(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)
