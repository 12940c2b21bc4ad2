"""A model's decoder layers captured as a graph, and the modules that replay them (CPU)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import STEP_KEYWORD, PagedStep
from gpu_worker.model.graph.torch_capture import Arena
from kernels.cpu.runtime.captured_graph import CapturedGraph, CapturedOp


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of a layer's call, without hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in a fixed order."""
        found: list[torch.Tensor] = []
        _gather(self.args, found)
        _gather(self.kwargs, found)
        return found

    def same(self, other: "LayerCall") -> bool:
        """Whether the other call has the very same objects as arguments."""
        return (
            len(self.args) == len(other.args)
            and self.kwargs.keys() == other.kwargs.keys()
            and all(a is b for a, b in zip(self.args, other.args, strict=True))
            and all(value is other.kwargs[name] for name, value in self.kwargs.items())
        )


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A tensor among the arguments of a layer's call that captured ops read.

    Attributes:
        call: index of the call.
        index: of the tensor among the call's.
        tensor: [1, N, ...] the graph's copy of it.
    """

    call: int
    index: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class CapturedOutput:
    """What follows the layers.

    Attributes:
        normed: [1, N, K] output of the last normalization.
        norm_ops: that compute it.
        logits: [1, N, V] of all rows; None: they would be too large.
        head_ops: that compute them.
    """

    normed: torch.Tensor
    norm_ops: Sequence[CapturedOp]
    logits: torch.Tensor | None
    head_ops: Sequence[CapturedOp]


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """A graph and the memory it reads and writes. A step of T tokens uses the first T of N rows.

    Attributes:
        graph: of the layers.
        step: in which they were captured; it has the caches and the backend.
        hidden: [1, N, K] input of the first layer.
        embedding_ops: write ``hidden`` by token ids; None: it has to be copied there.
        inputs: other arguments of the layers that ops read.
        out: [1, N, K] output of the last layer.
        ops: of the layers.
        output: what follows them; None: that is not captured.
        arena: the memory of all that, and of intermediate results.
    """

    graph: CapturedGraph
    step: PagedStep
    hidden: torch.Tensor
    embedding_ops: Sequence[CapturedOp] | None
    inputs: tuple[LayerInput, ...]
    out: torch.Tensor
    ops: Sequence[CapturedOp]
    output: CapturedOutput | None
    arena: Arena

    def serves(self, num_tokens: int, step: PagedStep) -> bool:
        """Whether the step has the same caches, and no more tokens than the captured one."""
        return step.lies_where(self.step) and num_tokens <= self.graph.num_tokens

    def replay(
        self, hidden: torch.Tensor, calls: Sequence[LayerCall], step: PagedStep
    ) -> torch.Tensor:
        """Hidden states [1, T, K] of the last layer; they stay valid until the next call."""
        num_tokens = hidden.shape[1]
        self.hidden[:, :num_tokens].copy_(hidden)
        tensors = [call.tensors() for call in calls] if self.inputs else ()
        for each in self.inputs:
            each.tensor[:, :num_tokens].copy_(tensors[each.call][each.index])
        self.graph.replay(num_tokens, step.batch)
        return self.out[:, :num_tokens]


class PassThroughLayer(nn.Module):
    """Takes the place of a layer: keeps its arguments and returns hidden states unchanged.

    Args:
        calls: of this pass so far, shared with the modules that follow.
        index: of this call.
    """

    def __init__(self, calls: list[LayerCall], index: int) -> None:
        super().__init__()
        self._calls = calls
        self._index = index

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [1, T, K], unchanged."""
        del self._calls[self._index :]  # a pass may have ended before its last layer
        self._calls.append(LayerCall(args, kwargs))
        return hidden


class LayersReached(Exception):
    """Ends a pass that is run for the arguments of the layers alone.

    Attributes:
        calls: those arguments.
    """

    def __init__(self, calls: list[LayerCall]) -> None:
        super().__init__()
        self.calls = calls


class StoppingLayer(nn.Module):
    """Takes the place of the layers behind pass-through ones: raises LayersReached."""

    def __init__(self, calls: list[LayerCall]) -> None:
        super().__init__()
        self._calls = calls

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Return nothing.

        Raises:
            LayersReached: always.
        """
        raise LayersReached([*self._calls, LayerCall(args, kwargs)])


class ReplayedLayers(nn.Module):
    """Takes the place of all decoder layers, behind a pass-through layer for each earlier call.

    Args:
        layers: the model's own, one after the other.
        call_of_layer: for each of them, the index of the call that has its arguments.
        calls: of the pass-through layers.

    Attributes:
        captured: replays the layers; steps that it does not serve are computed layer by layer.
    """

    def __init__(
        self, layers: nn.ModuleList, call_of_layer: Sequence[int], calls: list[LayerCall]
    ) -> None:
        super().__init__()
        self.layers = layers
        self.captured: CapturedLayers | None = None
        self._call_of_layer = call_of_layer
        self._calls = calls

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Inside the block, layers are called one by one."""
        captured, self.captured = self.captured, None
        try:
            yield
        finally:
            self.captured = captured

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [1, T, K] of the last layer."""
        calls = [*self._calls, LayerCall(args, kwargs)]
        self._calls.clear()
        step: Any = kwargs.get(STEP_KEYWORD)
        captured = self.captured if isinstance(step, PagedStep) else None
        if captured is not None and len(hidden) == 1 and captured.serves(hidden.shape[1], step):
            return captured.replay(hidden, calls, step)
        for layer, call in zip(self.layers, self._call_of_layer, strict=True):
            hidden = layer(hidden, *calls[call].args, **calls[call].kwargs)
        return hidden


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            _gather(each, found)
    elif isinstance(value, tuple | list):
        for each in value:
            _gather(each, found)
