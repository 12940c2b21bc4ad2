"""A forward pass without the model's own code around its layers (CPU).

That code checks its arguments, computes cosines and sines and wraps up its results in every step,
which takes long beside a small model's layers. Where it is known to do no more than to look up
embeddings and what belongs to positions, and to normalize and multiply in the end, a step is one
tape: lookups, layers, the last normalization and the output layer. Where all that is wanted of that
is the argmax of its logits, another tape ends with finding it (see
``kernels.cpu.sampling.pruned_argmax_kernel``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu_worker.model.attention import AttentionStep, PagedStep
from gpu_worker.model.graph.captured_layers import RecordedLayers
from gpu_worker.model.graph.position_tables import PositionTable
from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.runtime.captured_graph import JobRecorder, Tape
from kernels.cpu.runtime.kernel_kinds import LOOKUP_OF_POSITIONS
from kernels.cpu.runtime.thread_team import recording
from kernels.cpu.sampling.pruned_argmax import PrunedArgmax, RowArgmax
from shared.logs import EventLog

# Steps that the pruned argmax leaves undecided cost both. When there were so many, and they were
# more than this share of all, it is not used any more.
_UNDECIDED = 32
_MOST_UNDECIDED = 0.1

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Used:
    """What steps of so many tokens use of a tape's memory; decodes come one after the other."""

    num_tokens: int
    hidden: torch.Tensor  # [T, K]
    normed: torch.Tensor  # [1, T, K]
    logits: torch.Tensor | None  # [T, V]


class DirectPass:
    """Logits by the pieces of a model.

    Args:
        embedding: hidden states [1, T, K] of token ids [1, T].
        layers: as they are recorded, with what follows them.
        tables: of all that the layers read beside hidden states.
        head: logits [1, R, V] of normalized hidden states [1, R, K].
        pruned: of the head; None: all outputs are computed.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: RecordedLayers,
        tables: Sequence[PositionTable],
        head: nn.Module,
        pruned: PrunedArgmax | None = None,
    ) -> None:
        recorded = layers.recorded
        assert recorded is not None
        behind = recorded.behind
        assert behind is not None
        self._layers = layers
        self._recorded = recorded
        self._behind = behind
        self._tables = tables  # whose memory the tape reads
        self._head = head
        self._embedding = embedding
        self._is_embedded = recorded.before is not None  # by the tape
        positions = JobRecorder()
        with recording(positions):
            _look_up(tables, recorded.tape.num_tokens)
        jobs = [*(recorded.before or ()), *positions.jobs, *recorded.jobs, *behind.norm_jobs]
        self._num_normed = len(jobs)
        self._tape = Tape([*jobs, *behind.head_jobs], recorded.tape.num_tokens)
        self._used: _Used | None = None
        self._pruned = pruned
        self._num_pruned = self._num_undecided = 0
        if pruned is not None:
            recorder = JobRecorder()
            with recording(recorder):
                pruned(behind.normed[0])
            self._pruned_tape = Tape([*jobs, *recorder.jobs], recorded.tape.num_tokens)

    def serves(self, step: AttentionStep, num_tokens: int) -> bool:
        """Whether the layers would be played."""
        if self._layers.recorded is None or not isinstance(step, PagedStep):
            return False
        return self._recorded.serves(num_tokens, step)

    def logits(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
        rows: torch.Tensor | None,  # [R] int64; None: all
    ) -> torch.Tensor:
        """Logits [R, V] of a step that is served, until the next call."""
        assert isinstance(step, PagedStep)
        num_tokens = token_ids.shape[0]
        used = self._begin(token_ids)
        looked_up = token_ids, positions
        if rows is None and used.logits is not None:
            self._tape.play(num_tokens, step.batch, looked_up=looked_up)
            return used.logits
        self._tape.play(num_tokens, step.batch, self._num_normed, looked_up)
        logits: torch.Tensor = self._head(used.normed if rows is None else used.normed[:, rows])
        return logits[0]

    def argmax(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        step: AttentionStep,
    ) -> RowArgmax | torch.Tensor:
        """The argmax of a step that is served; or logits [T, V]. Until the next call."""
        if self._pruned is None:
            return self.logits(token_ids, positions, step, None)
        assert isinstance(step, PagedStep)
        num_tokens = token_ids.shape[0]
        used = self._begin(token_ids)
        self._pruned_tape.play(num_tokens, step.batch, looked_up=(token_ids, positions))
        found = self._pruned.found(num_tokens)
        self._num_pruned += 1
        if found.decided:
            return found
        self._count_undecided()
        logits: torch.Tensor = self._head(used.normed)
        return logits[0]

    def _count_undecided(self) -> None:
        self._num_undecided += 1
        if self._num_undecided < _UNDECIDED:
            return
        if self._num_undecided > _MOST_UNDECIDED * self._num_pruned:
            log.info("output layers are computed whole: too many outputs are nearly the largest")
            self._pruned = None
        self._num_pruned = self._num_undecided = 0

    def _begin(self, token_ids: torch.Tensor) -> _Used:
        """What the step uses; with its embeddings, if no tape looks them up."""
        used = self._use(token_ids.shape[0])
        if not self._is_embedded:
            used.hidden.copy_(self._embedding(token_ids.unsqueeze(0))[0])
        return used

    def _use(self, num_tokens: int) -> _Used:
        """As for the step before, if it was of the same size."""
        used = self._used
        if used is None or used.num_tokens != num_tokens:
            logits = self._behind.logits
            used = self._used = _Used(
                num_tokens,
                self._recorded.hidden[0, :num_tokens],
                self._behind.normed[:, :num_tokens],
                None if logits is None else logits[0, :num_tokens],
            )
        return used


def _look_up(tables: Sequence[PositionTable], num_tokens: int) -> None:
    """What layers read of positions, in the largest step."""
    lookups, nowhere = CpuLookups(), torch.zeros(num_tokens, dtype=torch.int64)
    for table in tables:
        lookups.look_up(LOOKUP_OF_POSITIONS, table.rows, nowhere, table.place)
