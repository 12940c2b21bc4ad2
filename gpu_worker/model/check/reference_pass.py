"""Computes a model's reference outputs: by its own code, and the same without rounding.

Each decoder layer runs twice on the same inputs: by transformers' own code in the model's type, and
with its weights in float32. The difference is the rounding error of this layer, which is the unit
of the check. Only one layer at a time has float32 weights in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.model.check.watched_layers import LayerCall, WatchedLayers
from gpu_worker.model.ragged_model import RaggedModel


@dataclass(frozen=True, slots=True)
class Reference:
    """Hidden states and logits of one sequence of T tokens.

    Attributes:
        tokens: [T] int64.
        embedded: [T, K] input of the first layer.
        own: output [T, K] of each layer, by the model's own code.
        exact: output [T, K] of each layer for the same input in float32; ``own`` itself if the
            model is in float32.
        own_logits: [T, vocabulary] by the model's own code.
        exact_logits: [T, vocabulary] with all layers in float32.
    """

    tokens: torch.Tensor
    embedded: torch.Tensor
    own: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]
    own_logits: torch.Tensor
    exact_logits: torch.Tensor

    def input_of(self, index: int) -> torch.Tensor:
        """The input [T, K] of a layer."""
        return self.own[index - 1] if index else self.embedded


class LayerReferences(Protocol):
    """Computes the outputs of layers that others are compared with."""

    def own(self, call: LayerCall) -> torch.Tensor:
        """The output [1, T, K] by the model's own code."""

    def exact(self, call: LayerCall, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for other hidden states [1, T, K] float32, in float32."""


class LoadedLayers:
    """The layers of the model itself, as it was loaded."""

    def own(self, call: LayerCall) -> torch.Tensor:
        """The output [1, T, K] by the model's own code."""
        return call.run(call.hidden)

    def exact(self, call: LayerCall, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for other hidden states [1, T, K] float32, in float32."""
        weights = call.weights_in(torch.float32)
        return [call.run_with(weights, each, torch.float32) for each in inputs]


def compute_references(
    model: RaggedModel,
    layers: WatchedLayers,
    sequences: Sequence[torch.Tensor],
    references: LayerReferences | None = None,
) -> tuple[Reference, ...]:
    """A reference for each sequence of token ids [T], by a model as it was loaded.

    Args:
        references: compute the layers; None: the model's own do.
    """
    found = references or LoadedLayers()
    return tuple(_Pass(model, layers, found).run(tokens) for tokens in sequences)


class _Pass:
    """Computes the reference of one sequence."""

    def __init__(
        self, model: RaggedModel, layers: WatchedLayers, references: LayerReferences
    ) -> None:
        self._model = model
        self._references = references
        self._layers = layers
        self._is_exact = model.dtype == torch.float32
        self._embedded: torch.Tensor | None = None
        self._own: list[torch.Tensor] = []
        self._exact: list[torch.Tensor] = []
        self._unrounded: torch.Tensor | None = None  # [1, T, K] with all layers so far in float32

    @torch.inference_mode()
    def run(self, tokens: torch.Tensor) -> Reference:
        with self._layers.visited(self._compute):
            own_logits = self._model.eager_logits(tokens).clone()
        exact_logits = own_logits
        if not self._is_exact:
            with self._layers.visited(self._put_unrounded):
                exact_logits = self._model.eager_logits(tokens).clone()
        assert self._embedded is not None
        own, exact = tuple(self._own), tuple(self._exact)
        return Reference(tokens, self._embedded, own, exact, own_logits, exact_logits)

    def _compute(self, call: LayerCall) -> torch.Tensor:
        if not call.index:
            self._embedded = call.hidden[0].clone()
        own = self._references.own(call)
        self._own.append(own[0].clone())
        if self._is_exact:
            self._exact.append(self._own[-1])
            return own
        hidden = call.hidden.float()
        before = hidden if self._unrounded is None else self._unrounded
        exact, self._unrounded = self._references.exact(call, (hidden, before))
        self._exact.append(exact[0])
        return own

    def _put_unrounded(self, call: LayerCall) -> torch.Tensor:
        """Skip the layers and return the unrounded output after the last one."""
        if call.index < len(self._layers) - 1:
            return call.hidden
        assert self._unrounded is not None
        return self._unrounded.to(call.hidden.dtype)
