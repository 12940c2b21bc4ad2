"""The kernels of a forward pass, captured once and replayed: what a CUDA graph is on a GPU.

Calling the small kernels of a decode step from Python takes longer than running them. A capture
stores each kernel and its arguments instead of running it; a graph runs them all in one call, on
threads that stay inside. Between replays only numbers of rows and the step's batch are patched.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.checks import check_batch, check_indices, check_slots
from kernels.cpu.runtime import graph_executor
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.graph_executor import GRAPH_LAYOUT, OP_FIELDS, graph_kernel
from kernels.cpu.runtime.kernel_arguments import NEXT_TASK, NEXT_THREAD, StepField
from kernels.cpu.runtime.thread_team import ThreadTeam, find_sched_yield
from kernels.interface import RaggedBatch

_Words = npt.NDArray[np.int64]

_LOOKUP_FIELDS = (StepField.TOKEN_IDS, StepField.POSITIONS)
_LINE_WORDS = 8  # numbers in a cache line
# Less is left to one thread: waking the others would take longer.
_SERIAL_MULTIPLICATIONS = 500_000
# Threads yield their cores after so many multiplications of a row, that is weights that are read:
# every fifty microseconds or so. To yield takes a third of one.
_YIELD_EVERY = 1_000_000


@dataclass(frozen=True, slots=True)
class CapturedOp:
    """A kernel and the arguments it was called with."""

    kernel: Kernel
    arguments: tuple[int, ...]

    @property
    def multiplications(self) -> int:
        """Of one row."""
        return self.kernel.layout.multiplications(self.arguments)


class GraphCapture:
    """Collects ops (see ``thread_team.capturing``)."""

    def __init__(self) -> None:
        self.ops: list[CapturedOp] = []

    def add(self, kernel: Kernel, address: int) -> None:
        """Copy the arguments at an address."""
        arguments = (ctypes.c_int64 * kernel.layout.num_fields).from_address(address)
        self.ops.append(CapturedOp(kernel, tuple(arguments)))


class CapturedGraph:
    """Ops captured in a step of many tokens, replayed for steps of as many or fewer.

    Not thread-safe: one call at a time. The memory that ops read and write must outlive the graph.

    Args:
        ops: in the order in which they run.
        num_tokens: of the step in which they were captured.

    Raises:
        ValueError: an op whose rows are no multiple of the tokens.
    """

    def __init__(self, ops: Sequence[CapturedOp], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._team = ThreadTeam()
        self._threads = self._team.num_threads()
        self._multiplications = sum(op.multiplications for op in ops)  # of a token
        self._kernel = graph_kernel()
        self._kernels = [op.kernel for op in ops]  # keeps their code
        starts = _starts(ops)
        self._words = _aligned(starts[-1])
        self._patches = _Patches(ops, starts, num_tokens)
        self._has_lookups = any(
            field in _LOOKUP_FIELDS for op in ops for _, field in op.kernel.layout.step_fields
        )
        for op, start in zip(ops, starts, strict=False):
            self._words[start : start + len(op.arguments)] = op.arguments
        self._scratch = self._patches.share_scratch(self._words, self._threads)
        base = self._words.ctypes.data
        self._table = _aligned(len(ops) * OP_FIELDS).reshape(len(ops), OP_FIELDS)
        self._table[:, graph_executor.KERNEL] = [op.kernel.address for op in ops]
        self._table[:, graph_executor.ARGUMENTS] = [base + 8 * start for start in starts[:-1]]
        self._table[:, graph_executor.YIELDS] = _yields(ops)
        self._args = _aligned(GRAPH_LAYOUT.num_fields)
        self._args[graph_executor.OPS] = self._table.ctypes.data
        self._args[graph_executor.SCHED_YIELD] = find_sched_yield()
        self._address = self._args.ctypes.data
        self._step = np.zeros(len(StepField), np.int64)

    def __len__(self) -> int:
        return len(self._kernels)

    @property
    def nbytes(self) -> int:
        """Memory of the ops' arguments and scratch."""
        return self._words.nbytes + self._table.nbytes + self._scratch.nbytes

    def replay(
        self,
        num_tokens: int,
        batch: RaggedBatch,
        num_ops: int | None = None,
        lookup_indices: tuple[torch.Tensor, torch.Tensor] | None = None,  # [num_tokens] int64 each
    ) -> None:
        """Run all ops, or the first ``num_ops``, for the tokens of a batch.

        Args:
            lookup_indices: token ids and positions, for a graph with lookups and only for it.

        Raises:
            ValueError: the arguments do not fit the graph.
        """
        if not 0 < num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens; 1 to {self.num_tokens} are served")
        check_slots(batch.slot_mapping, num_tokens)
        check_batch(batch)
        if (lookup_indices is not None) != self._has_lookups:
            raise ValueError("token ids and positions belong to ops that look rows up")
        if lookup_indices is not None:
            for field, indices in zip(_LOOKUP_FIELDS, lookup_indices, strict=True):
                check_indices(field.name.lower(), indices, num_tokens)
                self._step[field] = indices.data_ptr()
        self._step[: _LOOKUP_FIELDS[0]] = (
            batch.slot_mapping.data_ptr(),
            batch.block_tables.data_ptr(),
            4 * batch.block_tables.stride(0),
            batch.context_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.shape[0],
        )
        self._patches.apply(self._words, num_tokens, self._step)
        self._args[graph_executor.STATE] = 0
        serial = num_tokens * self._multiplications < _SERIAL_MULTIPLICATIONS
        threads = 1 if serial else min(self._threads, self._team.num_threads())
        self._args[graph_executor.NUM_OPS] = len(self) if num_ops is None else num_ops
        team_size = self._team.size_function if threads > 1 else 0
        self._args[graph_executor.TEAM_SIZE] = team_size
        self._team.run(self._kernel, self._address, threads)


class _Patches:
    """The arguments of all ops that change from step to step, as indices into one array."""

    def __init__(self, ops: Sequence[CapturedOp], starts: Sequence[int], num_tokens: int) -> None:
        counters: list[int] = []
        rows: list[tuple[int, int]] = []  # index, rows of a token
        chunks: list[tuple[int, int, int]] = []  # index, rows of a token, at most
        steps: list[tuple[int, int]] = []  # index, StepField
        self._scratches: list[int] = []
        for op, start in zip(ops, starts, strict=False):
            layout = op.kernel.layout
            counters += (start + NEXT_TASK, start + NEXT_THREAD)
            if layout.rows is not None:
                rows_each, rest = divmod(op.arguments[layout.rows], num_tokens)
                if rest or not rows_each:
                    raise ValueError(f"{op.arguments[layout.rows]} rows for {num_tokens} tokens")
                rows.append((start + layout.rows, rows_each))
                if layout.chunk_rows is not None:
                    chunks.append((start + layout.chunk_rows, rows_each, layout.max_chunk_rows))
            if layout.scratch is not None:
                self._scratches.append(start + layout.scratch)
            steps += [(start + index, field) for index, field in layout.step_fields]
        self._counters = np.array(counters)
        self._rows, self._rows_each = _columns(rows, 2)
        self._chunks, self._chunk_rows_each, self._max_chunk_rows = _columns(chunks, 3)
        self._steps, self._step_fields = _columns(steps, 2)

    def apply(
        self,
        words: _Words,
        num_tokens: int,
        step: _Words,  # [StepField]
    ) -> None:
        """Write what this step decides."""
        words[self._counters] = 0
        words[self._rows] = num_tokens * self._rows_each
        words[self._chunks] = np.minimum(num_tokens * self._chunk_rows_each, self._max_chunk_rows)
        words[self._steps] = step[self._step_fields]

    def share_scratch(self, words: _Words, num_threads: int) -> torch.Tensor:
        """Scratch memory that all ops share, since they run one at a time; written into them."""
        needed = max((int(words[at + 1]) for at in self._scratches), default=0)
        scratch = torch.empty(num_threads * needed + 64, dtype=torch.uint8)
        words[self._scratches] = -(-scratch.data_ptr() // 64) * 64
        return scratch


def _columns(rows: Sequence[tuple[int, ...]], num_columns: int) -> _Words:
    """Rows [n, columns] as columns [columns, n]."""
    return np.array(rows, np.int64).reshape(-1, num_columns).T


def _yields(ops: Sequence[CapturedOp]) -> list[bool]:
    """Behind which ops threads yield their cores."""
    yields, since = [], 0
    for op in ops:
        since += op.multiplications
        yields.append(since >= _YIELD_EVERY)
        since = 0 if yields[-1] else since
    return yields


def _starts(ops: Sequence[CapturedOp]) -> list[int]:
    """Indices at which the ops' arguments begin, on cache lines; and where the last ones end."""
    starts = [0]
    for op in ops:
        starts.append(starts[-1] + -(-len(op.arguments) // _LINE_WORDS) * _LINE_WORDS)
    return starts


def _aligned(num_words: int) -> _Words:
    """Zeros that begin on a cache line."""
    memory = np.zeros(num_words + _LINE_WORDS, np.int64)
    skipped = -memory.ctypes.data % (8 * _LINE_WORDS) // 8
    return memory[skipped : skipped + num_words]
