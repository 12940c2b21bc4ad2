"""A forward pass without the model's own code around its layers (CPU).

That code checks its arguments, computes cosines and sines and wraps up its results in every step,
which takes long beside a small model's layers. Where it is known to do no more than to look up
embeddings and what belongs to positions, and to normalize and multiply in the end, a step is an
embedding, a tape and an output layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu_worker.attention import AttentionStep, PagedStep
from gpu_worker.recorded_layers import RecordedLayers


@dataclass(frozen=True, slots=True)
class PositionTable:
    """What layers are told of positions.

    Attributes:
        rows: [L, ...], of each position.
        place: [N, ...], where the tape reads those of a step's tokens.
    """

    rows: torch.Tensor
    place: torch.Tensor


class DirectPass:
    """Logits by the pieces of a model.

    Args:
        embedding: hidden states [1, T, K] of token ids [1, T].
        layers: as they are recorded, with the last normalization behind them.
        tables: of all that the tape reads beside hidden states.
        head: logits [1, R, V] of normalized hidden states [1, R, K].
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: RecordedLayers,
        tables: Sequence[PositionTable],
        head: nn.Module,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._tables = tables
        self._head = head

    def serves(self, step: AttentionStep, num_tokens: int) -> bool:
        """Whether the layers would be played."""
        recorded = self._layers.recorded
        if recorded is None or not isinstance(step, PagedStep):
            return False
        return recorded.serves(num_tokens, step)

    def logits(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
        rows: torch.Tensor | None,  # [R] int64; None: all
    ) -> torch.Tensor:
        """Logits [R, V] of a step that is served."""
        recorded, num_tokens = self._layers.recorded, len(token_ids)
        assert recorded is not None
        assert recorded.normed is not None
        assert isinstance(step, PagedStep)
        recorded.hidden[0, :num_tokens].copy_(self._embedding(token_ids.unsqueeze(0))[0])
        for table in self._tables:
            torch.index_select(table.rows, 0, positions, out=table.place[:num_tokens])
        recorded.tape.play(num_tokens, step.batch)
        normed = recorded.normed[:, :num_tokens]
        logits: torch.Tensor = self._head(normed if rows is None else normed[:, rows])
        return logits[0]
