"""A forward pass as one captured graph, without the model's own code around its layers (CPU).

That code checks its arguments, computes cosines and sines and wraps its results in every step,
which takes long beside a small model's layers. Where it does nothing but look up embeddings and
tensors of positions, and normalize and multiply at the end, a step is one graph: lookups, layers,
the last normalization and the output layer. For steps that need only the argmax of their logits,
another graph ends with finding it (see ``kernels.cpu.sampling.pruned_argmax_kernel``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu_worker.model.attention import AttentionStep, PagedStep
from gpu_worker.model.graph.captured_layers import ReplayedLayers
from gpu_worker.model.graph.position_tables import PositionTable
from kernels.cpu.elementwise.elementwise_arguments import POSITION_LOOKUP_LAYOUT
from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.runtime.captured_graph import CapturedGraph, GraphCapture
from kernels.cpu.runtime.thread_team import capturing
from kernels.cpu.sampling.pruned_argmax import PrunedArgmax
from kernels.interface import RowArgmax
from shared.logs import EventLog

# Steps that the pruned argmax leaves undecided cost both. When there were so many, and they were
# more than this share of all, it is not used any more.
_UNDECIDED = 32
_MOST_UNDECIDED = 0.1

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _StepViews:
    """The rows of a graph's memory that a step of so many tokens uses."""

    num_tokens: int
    hidden: torch.Tensor  # [T, K]
    normed: torch.Tensor  # [1, T, K]
    logits: torch.Tensor | None  # [T, V]


class DirectPass:
    """Computes the logits of a step.

    Args:
        embedding: hidden states [1, T, K] of token ids [1, T].
        layers: captured together with what follows them.
        tables: of everything that the layers read beside hidden states.
        head: logits [1, R, V] of normalized hidden states [1, R, K].
        pruned: of the head; None: all outputs are computed.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: ReplayedLayers,
        tables: Sequence[PositionTable],
        head: nn.Module,
        pruned: PrunedArgmax | None = None,
    ) -> None:
        captured = layers.captured
        assert captured is not None
        output = captured.output
        assert output is not None
        self._layers = layers
        self._captured = captured
        self._output = output
        self._tables = tables  # whose memory the graph reads
        self._head = head
        self._embedding = embedding
        positions = GraphCapture()
        with capturing(positions):
            _look_up(tables, captured.graph.num_tokens)
        ops = [*(captured.embedding_ops or ()), *positions.ops, *captured.ops, *output.norm_ops]
        self._num_normed = len(ops)
        self._graph = CapturedGraph([*ops, *output.head_ops], captured.graph.num_tokens)
        self._last: _StepViews | None = None
        self._pruned = pruned
        self._num_pruned = self._num_undecided = 0
        if pruned is not None:
            capture = GraphCapture()
            with capturing(capture):
                pruned(output.normed[0])
            self._pruned_graph = CapturedGraph([*ops, *capture.ops], captured.graph.num_tokens)

    def serves(self, step: AttentionStep, num_tokens: int) -> bool:
        """Whether the layers would be replayed."""
        if self._layers.captured is None or not isinstance(step, PagedStep):
            return False
        return self._captured.serves(num_tokens, step)

    def logits(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
        rows: torch.Tensor | None,  # [R] int64; None: all
    ) -> torch.Tensor:
        """Logits [R, V] of a step that is served; they stay valid until the next call."""
        assert isinstance(step, PagedStep)
        num_tokens = token_ids.shape[0]
        views = self._begin(token_ids)
        indices = token_ids, positions
        if rows is None and views.logits is not None:
            self._graph.replay(num_tokens, step.batch, lookup_indices=indices)
            return views.logits
        self._graph.replay(num_tokens, step.batch, self._num_normed, indices)
        logits: torch.Tensor = self._head(views.normed if rows is None else views.normed[:, rows])
        return logits[0]

    def argmax(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
    ) -> RowArgmax | torch.Tensor:
        """The argmax of a step that is served, or its logits [T, V].

        They stay valid until the next call.
        """
        if self._pruned is None:
            return self.logits(token_ids, positions, step, None)
        assert isinstance(step, PagedStep)
        num_tokens = token_ids.shape[0]
        views = self._begin(token_ids)
        self._pruned_graph.replay(num_tokens, step.batch, lookup_indices=(token_ids, positions))
        found = self._pruned.found(num_tokens)
        self._num_pruned += 1
        if found.decided:
            return found
        self._count_undecided()
        logits: torch.Tensor = self._head(views.normed)
        return logits[0]

    def _count_undecided(self) -> None:
        self._num_undecided += 1
        if self._num_undecided < _UNDECIDED:
            return
        if self._num_undecided > _MOST_UNDECIDED * self._num_pruned:
            log.info("output layers are computed whole: too many outputs are nearly the largest")
            self._pruned = None
        self._num_pruned = self._num_undecided = 0

    def _begin(self, token_ids: torch.Tensor) -> _StepViews:
        """The step's rows; embeddings are written if no op of the graph does that."""
        views = self._views(token_ids.shape[0])
        if self._captured.embedding_ops is None:
            views.hidden.copy_(self._embedding(token_ids.unsqueeze(0))[0])
        return views

    def _views(self, num_tokens: int) -> _StepViews:
        """Those of the last step if it had as many tokens, as decodes do."""
        views = self._last
        if views is None or views.num_tokens != num_tokens:
            logits = self._output.logits
            views = self._last = _StepViews(
                num_tokens,
                self._captured.hidden[0, :num_tokens],
                self._output.normed[:, :num_tokens],
                None if logits is None else logits[0, :num_tokens],
            )
        return views


def _look_up(tables: Sequence[PositionTable], num_tokens: int) -> None:
    """Look up the rows of so many tokens in all tables."""
    lookups, positions = CpuLookups(), torch.zeros(num_tokens, dtype=torch.int64)
    for table in tables:
        lookups.look_up(POSITION_LOOKUP_LAYOUT, table.rows, positions, table.target)
