"""Memory for what a step is told: allocated once, filled step by step, copied to a GPU at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
# While one step computes, the next one is written down.
_NUM_TURNS = 2
_MOST_LAYOUTS = 256  # of steps that are not padded


@dataclass(frozen=True, slots=True)
class StepSize:
    """How many entries a step's inputs have, padding included."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_sampled: int  # M
    num_wanted: int  # R
    decodes: bool  # one row for each sequence

    @property
    def table_start(self) -> int:
        """Bytes in front of the block tables, which come last."""
        return _offsets(self)[-1]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The inputs of a step: numpy arrays on the host, tensors on the device."""

    token_ids: Any  # [T] int64; on the host those of chunks only
    positions: Any  # [T] int64
    slot_mapping: Any  # [T] int64, negative: padding
    slots: Any  # [S] int64, where the worker keeps each sequence
    sampled: Any  # [M] int64, slots that get a token
    wanted: Any  # [R] int64, rows whose logits are wanted
    keys: Any  # [2 * M] int32, of the noise of those that draw
    context_lens: Any  # [S] int32
    query_starts: Any  # [S + 1] int32
    tables: Any  # [S * width] int32, and what is left of the memory behind


class StepLayout:
    """The inputs of steps of one size, in the host's memory and on the device.

    Args:
        size: of the steps.
        hosts: bytes, one buffer for each turn.
        device: bytes; on a CPU the one host buffer itself.
    """

    def __init__(self, size: StepSize, hosts: Sequence[torch.Tensor], device: torch.Tensor) -> None:
        self.size = size
        self.device = StepArrays(*_views(device, size))
        self._bytes = (hosts, device)
        self._hosts = [StepArrays(*(each.numpy() for each in _views(host, size))) for host in hosts]
        self.num_bytes = len(device)
        self.table_start = size.table_start
        self.one_row_each = np.arange(size.num_seqs + 1)  # query starts where all decode
        self._tables: torch.Tensor | None = None

    def host(self, turn: int) -> StepArrays:
        """What is to be filled."""
        return self._hosts[turn]

    def tables(self, width: int) -> torch.Tensor:
        """Block tables [S, width] on the device."""
        if self._tables is None or self._tables.shape[1] != width:
            num_seqs = self.size.num_seqs
            self._tables = self.device.tables[: num_seqs * width].view(num_seqs, width)
        return self._tables

    def upload(self, turn: int, table_entries: int) -> None:
        """Copy what was filled, and so much of the tables, in the current stream."""
        hosts, device = self._bytes
        if hosts[turn] is not device:
            used = self.table_start + 4 * table_entries
            device[:used].copy_(hosts[turn][:used], non_blocking=True)


class StepBuffers:
    """Buffers for one step after the other; on GPUs the next may be filled while one computes.

    Args:
        device: where steps compute.
        largest: steps that there is room for from the start; larger ones get larger buffers.
        width: of their block tables.
    """

    def __init__(self, device: torch.device, largest: StepSize, width: int) -> None:
        self._device = device
        self._turn = 0
        self._kept: dict[StepSize, StepLayout] = {}
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_TURNS
        self._allocate(largest.table_start + 4 * largest.num_seqs * width)

    def layout(self, size: StepSize, width: int, keep: bool = False) -> StepLayout:
        """Where the inputs of a step of this size go, with block tables of this width.

        Args:
            keep: for good, at the same addresses; there must be room from the start.
        """
        found = self._kept.get(size)
        if found is None:
            found = self._layouts.get(size)
        start = size.table_start if found is None else found.table_start
        needed = start + 4 * size.num_seqs * width
        if needed > (self._num_bytes if found is None else found.num_bytes):
            assert not keep, (size, width)
            self._allocate(2 * needed)
            found = None
        if found is None:
            found = StepLayout(size, self._hosts, self._memory)
            if keep:
                self._kept[size] = found
            elif size.decodes and len(self._layouts) < _MOST_LAYOUTS:  # others hardly come again
                self._layouts[size] = found
        return found

    def next_turn(self) -> int:
        """Whose host buffer may be filled now; waits until the one filled before last is copied."""
        if self._device.type != "cuda":
            return 0
        self._turn = (self._turn + 1) % _NUM_TURNS
        if (event := self._copied[self._turn]) is not None:
            event.synchronize()
        return self._turn

    def copied(self, turn: int) -> None:
        """The copy of this turn's host buffer is queued."""
        if self._device.type == "cuda":
            event = self._copied[turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[turn] = event

    def _allocate(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._layouts: dict[StepSize, StepLayout] = {}
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._hosts = [self._memory]
        if self._device.type == "cuda":
            self._hosts = [
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                for _ in range(_NUM_TURNS)
            ]


def _offsets(size: StepSize) -> list[int]:
    """Where each field begins."""
    long, short = 8, 4
    lengths = (
        long * size.num_tokens,
        long * size.num_tokens,
        long * size.num_tokens,
        long * size.num_seqs,
        long * size.num_sampled,
        long * size.num_wanted,
        short * 2 * size.num_sampled,
        short * size.num_seqs,
        short * (size.num_seqs + 1),
    )
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _views(memory: torch.Tensor, size: StepSize) -> list[torch.Tensor]:
    """The fields of ``StepArrays`` in memory [bytes]."""
    offsets = _offsets(size)
    counts = (
        size.num_tokens,
        size.num_tokens,
        size.num_tokens,
        size.num_seqs,
        size.num_sampled,
        size.num_wanted,
        2 * size.num_sampled,
        size.num_seqs,
        size.num_seqs + 1,
        (len(memory) - offsets[-1]) // 4,
    )
    dtypes = [torch.int64] * 6 + [torch.int32] * 4
    assert len(counts) == len(dtypes) == len(fields(StepArrays)), counts
    return [
        memory[start : start + count * dtype.itemsize].view(dtype)
        for start, count, dtype in zip(offsets, counts, dtypes, strict=True)
    ]
