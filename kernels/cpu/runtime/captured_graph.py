"""The jobs of a forward pass, kept to be run again: what a CUDA graph is to a GPU.

Called one by one from Python, the small kernels of a decode step cost less than calling them. A
recorder notes each job instead of running it; a tape runs them all in one call, on threads that
stay inside. Only numbers of rows and what describes a step's batch are written anew.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.checks import check_batch, check_indices, check_slots
from kernels.cpu.linear import linear_arguments as linear
from kernels.cpu.runtime import kernel_arguments
from kernels.cpu.runtime.entry_points import Kernel, tape_kernel
from kernels.cpu.runtime.kernel_kinds import LINEAR, PRUNED_ARGMAX, OfStep
from kernels.cpu.runtime.thread_team import TeamRunner, find_give_way
from kernels.cpu.sampling import pruned_argmax_arguments as pruned_argmax
from kernels.interface import RaggedBatch

_Words = npt.NDArray[np.int64]

_LOOKED_UP = (OfStep.TOKEN_IDS, OfStep.POSITIONS)
_LINE_WORDS = 8  # numbers in a cache line
# Less is left to one thread: waking the others would take longer.
_SERIAL_MULTIPLICATIONS = 500_000
# Threads offer their cores after so many multiplications of a row, that is weights that are read:
# every fifty microseconds or so. Offering costs a third of one.
_OFFER_EVERY = 1_000_000


@dataclass(frozen=True, slots=True)
class NotedJob:
    """A kernel, and what it would have been told."""

    kernel: Kernel
    words: tuple[int, ...]


class JobRecorder:
    """Notes jobs (see ``thread_team.recording``)."""

    def __init__(self) -> None:
        self.jobs: list[NotedJob] = []

    def note(self, kernel: Kernel, job: int) -> None:
        words = (ctypes.c_int64 * kernel.kind.num_fields).from_address(job)
        self.jobs.append(NotedJob(kernel, tuple(words)))


class Tape:
    """Jobs that were noted for a step of many tokens, for steps of as many or fewer.

    Not thread-safe: one call at a time. What the jobs read and write must outlive the tape.

    Args:
        noted: in their order.
        num_tokens: of the step they were noted for.

    Raises:
        ValueError: a job whose rows are no multiple of the tokens.
    """

    def __init__(self, noted: Sequence[NotedJob], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._team = TeamRunner()
        self._threads = self._team.num_threads()
        self._multiplications = sum(map(_multiplications, noted))  # of a token
        self._kernel = tape_kernel()
        self._codes = [job.kernel for job in noted]
        starts = _starts(noted)
        self._words = _aligned(starts[-1])
        self._patches = _Patches(noted, starts, num_tokens)
        self._looks_up = any(
            number in _LOOKED_UP for job in noted for _, number in job.kernel.kind.of_step
        )
        self._entries = _aligned(len(noted) * kernel_arguments.ENTRY_FIELDS).reshape(len(noted), -1)
        for job, start in zip(noted, starts, strict=False):
            self._words[start : start + len(job.words)] = job.words
        self._scratch = self._patches.own_scratch(self._words, self._threads)
        base = self._words.ctypes.data
        self._entries[:, kernel_arguments.KERNEL] = [job.kernel.address for job in noted]
        self._entries[:, kernel_arguments.JOB] = [base + 8 * start for start in starts[:-1]]
        self._entries[:, kernel_arguments.OFFERED] = _offers(noted)
        self._job = _aligned(kernel_arguments.TAPE_FIELDS)
        self._job[kernel_arguments.ENTRIES] = self._entries.ctypes.data
        self._job[kernel_arguments.GIVE_WAY] = find_give_way()
        self._address = self._job.ctypes.data
        self._step = np.zeros(len(OfStep), np.int64)

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def nbytes(self) -> int:
        """Memory of the jobs and their scratch."""
        return self._words.nbytes + self._entries.nbytes + self._scratch.nbytes

    def play(
        self,
        num_tokens: int,
        batch: RaggedBatch,
        num_jobs: int | None = None,
        looked_up: tuple[torch.Tensor, torch.Tensor] | None = None,  # [num_tokens] int64 each
    ) -> None:
        """Run all jobs, or so many, for the tokens of a batch.

        Args:
            looked_up: token ids and positions, if there are jobs that look rows up by them.

        Raises:
            ValueError: the tape is not made for it.
        """
        if not 0 < num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens; 1 to {self.num_tokens} are served")
        check_slots(batch.slot_mapping, num_tokens)
        check_batch(batch)
        if (looked_up is not None) != self._looks_up:
            raise ValueError("token ids and positions belong to jobs that look rows up")
        if looked_up is not None:
            for place, indices in zip(_LOOKED_UP, looked_up, strict=True):
                check_indices(place.name.lower(), indices, num_tokens)
                self._step[place] = indices.data_ptr()
        self._step[: _LOOKED_UP[0]] = (
            batch.slot_mapping.data_ptr(),
            batch.block_tables.data_ptr(),
            4 * batch.block_tables.stride(0),
            batch.context_lens.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.shape[0],
        )
        self._patches.apply(self._words, num_tokens, self._step)
        self._job[kernel_arguments.STATE] = 0
        serial = num_tokens * self._multiplications < _SERIAL_MULTIPLICATIONS
        threads = 1 if serial else min(self._threads, self._team.num_threads())
        self._job[kernel_arguments.NUM_ENTRIES] = len(self) if num_jobs is None else num_jobs
        self._job[kernel_arguments.TEAM_SIZE] = self._team.team_size if threads > 1 else 0
        self._team.run(self._kernel, self._address, threads)


class _Patches:
    """Which words of the jobs a step decides, as indices."""

    def __init__(self, noted: Sequence[NotedJob], starts: Sequence[int], num_tokens: int) -> None:
        counters: list[int] = []
        rows: list[tuple[int, int]] = []  # word, rows of a token
        chunks: list[tuple[int, int, int]] = []  # word, rows of a token, at most
        steps: list[tuple[int, int]] = []  # word, which number
        self._scratches: list[int] = []
        for job, start in zip(noted, starts, strict=False):
            kind = job.kernel.kind
            counters += (start + kernel_arguments.NEXT_TASK, start + kernel_arguments.NEXT_THREAD)
            if kind.rows is not None:
                of_token, rest = divmod(job.words[kind.rows], num_tokens)
                if rest or not of_token:
                    raise ValueError(f"{job.words[kind.rows]} rows for {num_tokens} tokens")
                rows.append((start + kind.rows, of_token))
                if kind.chunk is not None:
                    chunks.append((start + kind.chunk, of_token, kind.most_chunk))
            if kind.scratch is not None:
                self._scratches.append(start + kind.scratch)
            steps += [(start + field, number) for field, number in kind.of_step]
        self._counters = np.array(counters)
        self._rows, self._of_token = _columns(rows, 2)
        self._chunks, self._chunk_rows, self._most_rows = _columns(chunks, 3)
        self._steps, self._numbers = _columns(steps, 2)

    def apply(
        self,
        words: _Words,
        num_tokens: int,
        step: _Words,  # [OfStep]
    ) -> None:
        """Write what this step decides."""
        words[self._counters] = 0
        words[self._rows] = num_tokens * self._of_token
        words[self._chunks] = np.minimum(num_tokens * self._chunk_rows, self._most_rows)
        words[self._steps] = step[self._numbers]

    def own_scratch(self, words: _Words, num_threads: int) -> torch.Tensor:
        """Scratch that serves all jobs, since never do two of them run; written into them."""
        needed = max((int(words[at + 1]) for at in self._scratches), default=0)
        scratch = torch.empty(num_threads * needed + 64, dtype=torch.uint8)
        words[self._scratches] = -(-scratch.data_ptr() // 64) * 64
        return scratch


def _columns(rows: Sequence[tuple[int, ...]], num_columns: int) -> npt.NDArray[np.int64]:
    """Rows [n, columns] as columns [columns, n]."""
    return np.array(rows, np.int64).reshape(-1, num_columns).T


def _multiplications(job: NotedJob) -> int:
    """Of a linear layer, or of a pruned argmax, for one row."""
    if job.kernel.kind is PRUNED_ARGMAX:  # three kernels, one of which multiplies
        return job.words[pruned_argmax.IN_FEATURES] * job.words[pruned_argmax.OUT_FEATURES] // 3
    if job.kernel.kind is not LINEAR:
        return 0
    num_outputs = job.words[linear.NUM_GROUPS] * linear.GROUP_OUTPUTS
    return job.words[linear.IN_FEATURES] * num_outputs


def _offers(noted: Sequence[NotedJob]) -> list[bool]:
    """Behind which jobs threads offer their cores."""
    offers, since = [], 0
    for job in noted:
        since += _multiplications(job)
        offers.append(since >= _OFFER_EVERY)
        since = 0 if offers[-1] else since
    return offers


def _starts(noted: Sequence[NotedJob]) -> list[int]:
    """Where each job begins, in words and on a cache line; and where the last one ends."""
    starts = [0]
    for job in noted:
        starts.append(starts[-1] + -(-len(job.words) // _LINE_WORDS) * _LINE_WORDS)
    return starts


def _aligned(num_words: int) -> _Words:
    """Zeros that begin on a cache line."""
    memory = np.zeros(num_words + _LINE_WORDS, np.int64)
    skipped = -memory.ctypes.data % (8 * _LINE_WORDS) // 8
    return memory[skipped : skipped + num_words]
