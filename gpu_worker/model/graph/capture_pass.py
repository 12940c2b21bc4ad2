"""The forward pass that captures a model's layers: every kernel is stored, and none runs (CPU)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_worker.model.attention import STEP_KEYWORD, PagedStep
from gpu_worker.model.graph.captured_layers import (
    CapturedLayers,
    CapturedOutput,
    LayerCall,
    LayerInput,
)
from gpu_worker.model.graph.model_inputs_outputs import InputOutputLayers
from gpu_worker.model.graph.torch_capture import Arena, CannotCapture, TorchCapture
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.captured_graph import CapturedGraph, CapturedOp, GraphCapture
from kernels.cpu.runtime.thread_team import capturing
from shared.logs import EventLog

_MOST_LOGITS_BYTES = 1 << 29

log = EventLog(__name__)


class CapturingLayers(nn.Module):
    """Takes the place of a model's layers for one pass of as many tokens as a step may have.

    Args:
        layers: whose kernels are captured.
        call_of_layer: for each of them, the index of the call that has its arguments.
        calls: of the pass-through layers before this module.
        kernels: compute what is between the layers' own calls.
        ends: the modules before and behind the layers; None: they are not captured.

    Attributes:
        captured: after the pass.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        call_of_layer: Sequence[int],
        calls: list[LayerCall],
        kernels: CpuLayers,
        ends: InputOutputLayers | None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.captured: CapturedLayers | None = None
        self._call_of_layer = call_of_layer
        self._calls = calls
        self._kernels = kernels
        self._ends = ends

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [1, N, K], unchanged.

        Raises:
            CannotCapture: the layers compute something that a graph cannot hold.
        """
        step: PagedStep = kwargs[STEP_KEYWORD]
        arena = Arena()
        copies = _TensorCopies(arena)
        calls = [
            LayerCall(copies.replace(call.args), copies.replace(call.kwargs))
            for call in [*self._calls, LayerCall(args, kwargs)]
        ]
        embedding = self._capture_embedding(arena, hidden)
        if embedding is None:
            first = arena.empty(tuple(hidden.shape), hidden.dtype)
        else:
            first = embedding.hidden
        capture, output = GraphCapture(), None
        with capturing(capture), TorchCapture(arena, self._kernels.elements):
            out = self._call_layers(first, calls)
            ops = list(capture.ops)
            if self._ends is not None:
                output = _capture_output(self._ends, out, capture)
        if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
            raise CannotCapture("its layers do not hand on hidden states alone")
        self.captured = CapturedLayers(
            graph=CapturedGraph(ops, hidden.shape[1]),
            step=step,
            hidden=first,
            embedding_ops=None if embedding is None else embedding.ops,
            inputs=self._find_inputs(ops, calls, hidden),
            out=out,
            ops=ops,
            output=output,
            arena=arena,
        )
        return hidden

    def _call_layers(self, hidden: torch.Tensor, calls: Sequence[LayerCall]) -> torch.Tensor:
        for layer, call in zip(self.layers, self._call_of_layer, strict=True):
            hidden = layer(hidden, *calls[call].args, **calls[call].kwargs)
        return hidden

    def _find_inputs(
        self, ops: Sequence[CapturedOp], calls: Sequence[LayerCall], hidden: torch.Tensor
    ) -> tuple[LayerInput, ...]:
        """The tensors among the layers' arguments that ops read.

        Raises:
            CannotCapture: such a tensor has no row for each of the step's tokens.
        """
        inputs = tuple(
            LayerInput(number, index, tensor)
            for number, call in enumerate(calls)
            for index, tensor in enumerate(call.tensors())
            if number in self._call_of_layer and _is_read(tensor, ops)
        )
        for each in inputs:
            if each.tensor.shape[:2] != hidden.shape[:2]:
                raise CannotCapture(f"its layers read a tensor of shape {tuple(each.tensor.shape)}")
        return inputs

    def _capture_embedding(self, arena: Arena, hidden: torch.Tensor) -> "_CapturedEmbedding | None":
        """The lookup of so many tokens; None: the embedding does more than a graph can hold."""
        if self._ends is None:
            return None
        capture, token_ids = GraphCapture(), torch.zeros(hidden.shape[1], dtype=torch.int64)
        try:
            with capturing(capture), TorchCapture(arena, self._kernels.elements, token_ids):
                found = self._ends.embedding(token_ids.unsqueeze(0))
        except Exception as error:  # a model's own code raises whatever it likes
            log.debug("the graph does not look up embeddings", because=error)
            return None
        return _CapturedEmbedding(found, capture.ops) if found.shape == hidden.shape else None


@dataclass(frozen=True, slots=True)
class _CapturedEmbedding:
    """The input of the first layer [1, N, K], and the ops that write it."""

    hidden: torch.Tensor
    ops: Sequence[CapturedOp]


def _capture_output(
    ends: InputOutputLayers, out: torch.Tensor, capture: GraphCapture
) -> CapturedOutput:
    """Capture what follows the layers."""
    begin = len(capture.ops)
    normed = ends.norm(out)
    behind_norm, num_tokens = len(capture.ops), out.shape[1]
    # For steps that need the logits of every row; memory that no step needs is never touched.
    fits = num_tokens * ends.vocab_size * torch.float32.itemsize <= _MOST_LOGITS_BYTES
    logits = ends.head(normed) if fits else None
    return CapturedOutput(normed, capture.ops[begin:behind_norm], logits, capture.ops[behind_norm:])


class _TensorCopies:
    """The graph's own memory for tensors among the layers' arguments."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def replace(self, value: Any) -> Any:
        """The same value with a tensor of the graph's for each tensor in it."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._copies:
                copy = self._arena.empty(tuple(value.shape), value.dtype)
                self._copies[id(value)] = value, copy
            return self._copies[id(value)][1]
        if isinstance(value, Mapping):
            return {name: self.replace(each) for name, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self.replace(each) for each in value)
        return value


def _is_read(tensor: torch.Tensor, ops: Sequence[CapturedOp]) -> bool:
    """Whether an argument of an op is an address inside the tensor."""
    begin = tensor.data_ptr()
    behind = begin + tensor.nbytes
    return any(begin <= argument < behind for op in ops for argument in op.arguments)
