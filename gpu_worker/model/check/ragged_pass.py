"""Computes sequences together in ragged steps, over scattered blocks."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kv.memory import KVMemory
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.step.token_placement import Placement
from kernels.interface import AttentionBackend

Span = tuple[int, int]
"""Tokens [a, b) of a sequence."""


class RaggedPass:
    """Computes all tokens of a few sequences, step by step.

    Args:
        model: to run.
        backend: attention kernels.
        memory: with ``num_blocks_for`` blocks.
        block_size: of the memory, in tokens.
        sequences: token ids [T] of each.

    Attributes:
        spans: tokens of each sequence that the present step computes.
    """

    def __init__(
        self,
        model: RaggedModel,
        backend: AttentionBackend,
        memory: KVMemory,
        block_size: int,
        sequences: Sequence[torch.Tensor],
    ) -> None:
        self.spans: list[Span] = []
        self._model = model
        self._backend = backend
        self._memory = memory
        self._block_size = block_size
        self._sequences = sequences

    def logits(self) -> torch.Tensor:
        """Logits [T of all, vocabulary], sequence by sequence."""
        lengths = [len(tokens) for tokens in self._sequences]
        num_blocks = num_blocks_for(lengths, self._block_size)
        # Consecutive blocks of a sequence must not be consecutive in the pool.
        order = np.arange(num_blocks, dtype=np.int32)[::-1]
        tables = order.reshape(-1, len(lengths)).T
        found: list[list[torch.Tensor]] = [[] for _ in lengths]
        for self.spans in spans_of_steps(lengths):
            for parts, part in zip(found, self._step(tables), strict=True):
                parts.append(part)
        return torch.cat([torch.cat(parts) for parts in found])

    def _step(self, tables: npt.NDArray[np.int32]) -> Sequence[torch.Tensor]:
        spans, memory, device = self.spans, self._memory, self._model.device
        batch = memory.translate(_placement(spans, tables, self._block_size)).ragged(device)
        tokens = torch.cat([all_[a:b] for all_, (a, b) in zip(self._sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans]).to(device)
        step = PagedStep(self._backend, memory.caches, batch)
        logits = self._model.forward(tokens, positions, step, rows=None).clone()
        memory.mark_queued()
        return torch.split(logits, [b - a for a, b in spans])


def num_blocks_for(lengths: Sequence[int], block_size: int) -> int:
    """Number of blocks for sequences of these lengths, each with as many as the longest."""
    return len(lengths) * -(-max(lengths) // block_size)


def spans_of_steps(lengths: Sequence[int]) -> Iterator[list[Span]]:
    """Spans of each step: uneven chunks, decodes with and without chunks, then the rest."""
    done = [0] * len(lengths)
    first = [13 + 6 * index for index in range(len(lengths))]
    for sizes in (first, [1, 5], [1, 1], [5, 1], [1, 4], [1, 1], lengths):
        ends = [min(n, a + size) for n, a, size in zip(lengths, done, sizes, strict=True)]
        if ends != done:
            yield list(zip(done, ends, strict=True))
        done = ends


def row_groups(lengths: Sequence[int], ragged: bool) -> list[torch.Tensor]:
    """Groups of rows, as indices into the rows of all sequences, that one bug would make wrong.

    The groups are the quarters of each sequence. For ragged steps they are also all decodes, and
    all first and all last rows of longer chunks.
    """
    starts = np.cumsum([0, *lengths])
    rows = [torch.arange(a, a + n) for a, n in zip(starts.tolist(), lengths, strict=False)]
    groups = [quarter for each in rows for quarter in each.chunk(4)]
    if not ragged:
        return groups
    alone: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for spans in spans_of_steps(lengths):
        for start, (a, b) in zip(starts.tolist(), spans, strict=False):
            if b - a == 1:
                alone.append(start + a)
            elif b > a:
                first.append(start + a)
                last.append(start + b - 1)
    return groups + [torch.tensor(each) for each in (alone, first, last) if each]


def _placement(spans: Sequence[Span], tables: npt.NDArray[np.int32], block_size: int) -> Placement:
    """The placement of tokens [a, b) of each sequence; ``tables`` is [S, max_blocks]."""
    positions = np.concatenate([np.arange(a, b) for a, b in spans])
    sizes = np.array([b - a for a, b in spans])
    sequences = np.repeat(np.arange(len(spans)), sizes)
    blocks = tables[sequences, positions // block_size].astype(np.int64)
    return Placement(
        slots=np.arange(len(spans)),
        sizes=sizes,
        positions=positions,
        context_lens=np.array([b for _, b in spans]),
        num_blocks=np.full(len(spans), tables.shape[1]),
        block_tables=np.ascontiguousarray(tables),
        slot_mapping=blocks * block_size + positions % block_size,
    )
