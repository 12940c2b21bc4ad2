"""Buffers for steps' inputs: allocated once, filled for each step, copied to a GPU at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
# While one step computes, the inputs of the next are written.
_NUM_HOST_BUFFERS = 2
_MOST_LAYOUTS = 256  # of steps that are not padded


@dataclass(frozen=True, slots=True)
class StepSize:
    """Numbers of entries of a step's inputs, padding included."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_sampled: int  # M
    num_wanted: int  # R
    decodes: bool  # one row for each sequence

    @property
    def table_start(self) -> int:
        """Offset of the block tables, which come last, in bytes."""
        return _offsets(self)[-1]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The inputs of a step: numpy arrays on the host, tensors on the device."""

    token_ids: Any  # [T] int64; on the host only those of chunks
    positions: Any  # [T] int64
    slot_mapping: Any  # [T] int64, negative: padding
    slots: Any  # [S] int64, batch slot of each sequence
    sampled: Any  # [M] int64, batch slots that get a token
    wanted: Any  # [R] int64, rows whose logits are wanted
    keys: Any  # [2 * M] int32, random keys of rows that sample with noise
    context_lens: Any  # [S] int32
    query_starts: Any  # [S + 1] int32
    tables: Any  # [S * width] int32, then the rest of the buffer


class StepLayout:
    """Views of the buffers for steps of one size, on the host and on the device.

    Args:
        size: of the steps.
        hosts: host buffers [bytes], filled alternately.
        device: device buffer [bytes]; on a CPU the one host buffer itself.
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

    def host(self, buffer: int) -> StepArrays:
        """The arrays of one host buffer, to be filled."""
        return self._hosts[buffer]

    def tables(self, width: int) -> torch.Tensor:
        """Block tables [S, width] on the device."""
        if self._tables is None or self._tables.shape[1] != width:
            num_seqs = self.size.num_seqs
            self._tables = self.device.tables[: num_seqs * width].view(num_seqs, width)
        return self._tables

    def upload(self, buffer: int, table_entries: int) -> int:
        """Copy a host buffer, with so many entries of the tables, in the current stream.

        Returns the number of bytes; on a CPU they are there already.
        """
        hosts, device = self._bytes
        used = self.table_start + 4 * table_entries
        if hosts[buffer] is not device:
            device[:used].copy_(hosts[buffer][:used], non_blocking=True)
        return used


class StepBuffers:
    """Buffers that consecutive steps share; on GPUs there are two on the host, used alternately.

    Args:
        device: where steps compute.
        largest: step that the buffers are allocated for; a larger step makes them grow.
        width: of its block tables.
    """

    def __init__(self, device: torch.device, largest: StepSize, width: int) -> None:
        self._device = device
        self._last_filled = 0
        self._kept: dict[StepSize, StepLayout] = {}
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_HOST_BUFFERS
        self._allocate(largest.table_start + 4 * largest.num_seqs * width)

    @property
    def on_gpu(self) -> bool:
        """Whether inputs are copied from the host to the device."""
        return self._device.type == "cuda"

    def layout(self, size: StepSize, width: int, keep: bool = False) -> StepLayout:
        """The views for a step of this size, with block tables of this width.

        Args:
            size: of the step.
            width: columns of its block tables.
            keep: keep the addresses for ever, as a graph needs; the buffers must be large enough.
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
            elif size.decodes and len(self._layouts) < _MOST_LAYOUTS:  # other sizes hardly repeat
                self._layouts[size] = found
        return found

    def next_host_buffer(self) -> int:
        """The host buffer to fill now; waits until its last copy to the device has ended."""
        if not self.on_gpu:
            return 0
        self._last_filled = (self._last_filled + 1) % _NUM_HOST_BUFFERS
        if (event := self._copied[self._last_filled]) is not None:
            event.synchronize()
        return self._last_filled

    def copied(self, buffer: int) -> None:
        """Mark that the copy of a host buffer is queued."""
        if self.on_gpu:
            event = self._copied[buffer] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[buffer] = event

    def _allocate(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._layouts: dict[StepSize, StepLayout] = {}
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._hosts = [self._memory]
        if self.on_gpu:
            self._hosts = [
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
                for _ in range(_NUM_HOST_BUFFERS)
            ]


def _offsets(size: StepSize) -> list[int]:
    """Offsets of the fields, in bytes."""
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
    """The fields of ``StepArrays`` as views of memory [bytes]."""
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
