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
from gpu_worker.position_tables import PositionTable
from gpu_worker.recorded_layers import Recorded, RecordedLayers


@dataclass(frozen=True, slots=True)
class _Used:
    """What steps of so many tokens use of a tape's memory; decodes come one after the other."""

    recorded: Recorded
    num_tokens: int
    hidden: torch.Tensor  # [T, K]
    places: tuple[torch.Tensor, ...]  # of the tables, [T, ...]
    normed: torch.Tensor  # [1, T, K]
    logits: torch.Tensor | None  # [T, V]


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
        self._embeddings: torch.Tensor | None = None
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            self._embeddings = embedding.weight
        self._used: _Used | None = None

    def serves(self, step: AttentionStep, num_tokens: int) -> bool:
        """Whether the layers would be played."""
        recorded = self._layers.recorded
        if recorded is None or recorded.behind is None or not isinstance(step, PagedStep):
            return False
        return recorded.serves(num_tokens, step)

    def logits(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
        rows: torch.Tensor | None,  # [R] int64; None: all
    ) -> torch.Tensor:
        """Logits [R, V] of a step that is served, until the next call."""
        recorded = self._layers.recorded
        assert recorded is not None
        assert recorded.behind is not None
        assert isinstance(step, PagedStep)
        used = self._use(recorded, token_ids.shape[0])
        if self._embeddings is None:
            used.hidden.copy_(self._embedding(token_ids.unsqueeze(0))[0])
        else:
            torch.index_select(self._embeddings, 0, token_ids, out=used.hidden)
        for table, place in zip(self._tables, used.places, strict=True):
            torch.index_select(table.rows, 0, positions, out=place)
        if rows is None and used.logits is not None:
            recorded.tape.play(used.num_tokens, step.batch)
            return used.logits
        recorded.tape.play(used.num_tokens, step.batch, recorded.behind.num_jobs)
        logits: torch.Tensor = self._head(used.normed if rows is None else used.normed[:, rows])
        return logits[0]

    def _use(self, recorded: Recorded, num_tokens: int) -> _Used:
        """As for the step before, if it was of the same size."""
        used = self._used
        if used is None or used.num_tokens != num_tokens or used.recorded is not recorded:
            assert recorded.behind is not None
            logits = recorded.behind.logits
            used = self._used = _Used(
                recorded,
                num_tokens,
                recorded.hidden[0, :num_tokens],
                tuple(table.place[:num_tokens] for table in self._tables),
                recorded.behind.normed[:, :num_tokens],
                None if logits is None else logits[0, :num_tokens],
            )
        return used
