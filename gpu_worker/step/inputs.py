"""Writes the inputs of a forward pass into existing buffers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import Indices, Rows
from gpu_worker.step.buckets import Bucket, Buckets
from gpu_worker.step.input_buffers import StepArrays, StepBuffers, StepLayout, StepSize
from gpu_worker.step.token_placement import Placement, spread_tables, write_flat_tables
from kernels.interface import RaggedBatch

_NO_SLOT = -1  # padding in a slot mapping: kernels write nothing for it


@dataclass(slots=True)
class StepInputs:
    """Inputs on the device; rows after the step's own are padding.

    They are valid until the inputs of another step are written.
    """

    token_ids: torch.Tensor  # [T] int64; the caller fills in those of decoding sequences
    positions: torch.Tensor  # [T] int64
    batch: RaggedBatch
    wanted: torch.Tensor | None  # [R] int64, rows whose logits are wanted; None: all
    decoding: (
        torch.Tensor
    )  # [n] int64, batch slots of the decoding sequences, whose rows come first
    sampled: torch.Tensor  # [M] int64, batch slots that get a token
    keys: torch.Tensor  # [2, N] int32, keys of the Gumbel noise of random rows
    bucket: Bucket | None  # that the step was padded to
    num_bytes: int  # copied to a GPU


class InputWriter:
    """Writes the inputs of steps into buffers.

    Args:
        buffers: to write into.
        buckets: sizes to pad steps to; None: steps are not padded.
        most_keys: longest context of a sequence, which padded steps give to kernels as maximum.

    Attributes:
        buckets: as given; may be set later.
        flattens: whether sparse block tables are sent one after the other, as to a GPU.
    """

    def __init__(self, buffers: StepBuffers, buckets: Buckets | None, most_keys: int) -> None:
        self.buckets = buckets
        self.flattens = buffers.on_gpu
        self._buffers = buffers
        self._most_keys = most_keys

    def write(
        self,
        rows: Rows,
        placement: Placement,
        wanted: Indices | None,
        keys: npt.NDArray[np.int32],  # [2, N]
        only_samples: bool,
    ) -> StepInputs:
        """Write the inputs of a step, and queue their copy to a GPU.

        Args:
            rows: that the step computes.
            placement: blocks and KV slots of the rows.
            wanted: rows whose logits are wanted; None: all.
            keys: random keys of rows that sample with noise.
            only_samples: whether the wanted rows are exactly those that sample.
        """
        bucket = self._bucket(rows) if only_samples else None
        size = _size(rows, wanted, bucket)
        width = placement.block_tables.shape[1]
        layout = self._buffers.layout(size, width, keep=bucket is not None)
        buffer = self._buffers.next_host_buffer()
        host = layout.host(buffer)
        _fill(host, layout, rows, placement)
        is_flat = self.flattens and placement.is_sparse
        if is_flat:
            num_entries = write_flat_tables(placement, host.tables, size.num_seqs)
        else:
            num_entries = placement.block_tables.size
            host.tables[:num_entries].reshape(-1, width)[:] = placement.block_tables
        if wanted is not None:
            _pad(host.wanted, wanted, 0)
        device = layout.device
        device_keys = device.keys  # unused if no row samples with noise
        if keys.size:
            host.keys[: keys.size] = keys.ravel()
            device_keys = device_keys[: keys.size].view(keys.shape)
        num_bytes = layout.upload(buffer, num_entries)
        self._buffers.copied(buffer)
        if is_flat:
            tables = spread_tables(device.tables[:num_entries], size.num_seqs, width)
        else:
            tables = layout.tables(width)
        return StepInputs(
            token_ids=device.token_ids,
            positions=device.positions,
            batch=self._ragged(layout, tables, rows, placement, bucket),
            wanted=None if wanted is None else device.wanted,
            decoding=first(device.slots, rows.num_decoding),
            sampled=first(device.sampled, len(rows.sampled)),
            keys=device_keys,
            bucket=bucket,
            num_bytes=num_bytes,
        )

    def padding(self, bucket: Bucket) -> StepInputs:
        """Inputs of a step of padding alone: it costs as much as a real one and writes nothing."""
        layout = self._buffers.layout(bucket_size(bucket), 1, keep=True)
        tables = layout.tables(1)
        buffer = self._buffers.next_host_buffer()
        host = layout.host(buffer)
        for field in (host.token_ids, host.positions, host.slots, host.wanted, host.context_lens):
            field[:] = 0
        host.slot_mapping[:] = _NO_SLOT
        host.query_starts[:] = layout.one_row_each if bucket.decodes else 0
        num_bytes = layout.upload(buffer, 0)
        self._buffers.copied(buffer)
        device = layout.device
        max_query_len, max_context_len = bounds(bucket, self._most_keys)
        return StepInputs(
            token_ids=device.token_ids,
            positions=device.positions,
            batch=RaggedBatch(
                device.slot_mapping,
                tables,
                device.context_lens,
                device.query_starts,
                max_query_len,
                max_context_len,
            ),
            wanted=None if bucket.decodes else device.wanted,
            decoding=device.slots[:0],
            sampled=device.sampled[:0],
            keys=device.keys[:0].view(2, 0),
            bucket=bucket,
            num_bytes=num_bytes,
        )

    def _bucket(self, rows: Rows) -> Bucket | None:
        if self.buckets is None or (rows.forks is not None and rows.sizes is None):
            return None
        num_seqs = max(len(rows.slots), len(rows.sampled))  # forks come on top
        return self.buckets.choose(rows.num_tokens, num_seqs, rows.sizes is None)

    def _ragged(
        self,
        layout: StepLayout,
        tables: torch.Tensor,
        rows: Rows,
        placement: Placement,
        bucket: Bucket | None,
    ) -> RaggedBatch:
        device = layout.device
        if bucket is not None:
            max_query_len, max_context_len = bounds(bucket, self._most_keys)
        else:
            max_query_len = 1 if rows.sizes is None else int(rows.sizes.max())
            max_context_len = int(placement.context_lens.max())
        return RaggedBatch(
            slot_mapping=device.slot_mapping,
            block_tables=tables,
            context_lens=device.context_lens,
            query_starts=device.query_starts,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )


def first(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """The first ``num`` entries; the tensor itself if it has no more."""
    return tensor if tensor.shape[0] == num else tensor[:num]


def bounds(bucket: Bucket, most_keys: int) -> tuple[int, int]:
    """Most rows and keys of a sequence in any step that is padded to this bucket."""
    return 1 if bucket.decodes else bucket.num_tokens, most_keys


def bucket_size(bucket: Bucket) -> StepSize:
    """Numbers of entries of the inputs of steps that are padded to this bucket."""
    num_seqs = bucket.num_seqs
    num_wanted = 0 if bucket.decodes else num_seqs
    return StepSize(bucket.num_tokens, num_seqs, num_seqs, num_wanted, bucket.decodes)


def _size(rows: Rows, wanted: Indices | None, bucket: Bucket | None) -> StepSize:
    if bucket is not None:
        return bucket_size(bucket)
    num_wanted = 0 if wanted is None else len(wanted)
    decodes = rows.sizes is None
    return StepSize(rows.num_tokens, len(rows.slots), len(rows.sampled), num_wanted, decodes)


def _fill(host: StepArrays, layout: StepLayout, rows: Rows, placement: Placement) -> None:
    num_tokens, num_seqs = rows.num_tokens, len(rows.slots)
    at = rows.num_decoding
    host.slots[:at] = rows.slots[:at]
    for chunk in rows.chunks:
        host.token_ids[at : at + chunk.size] = chunk.tokens[: chunk.size]
        at += chunk.size
    host.token_ids[at:] = 0
    host.sampled[: len(rows.sampled)] = rows.sampled
    _pad(host.positions, rows.positions, 0)
    _pad(host.slot_mapping, placement.slot_mapping, _NO_SLOT)
    _pad(host.context_lens, placement.context_lens, 0)
    if rows.sizes is None:
        host.query_starts[:] = layout.one_row_each
    else:
        host.query_starts[0] = 0
        np.cumsum(rows.sizes, out=host.query_starts[1 : num_seqs + 1])
        host.query_starts[num_seqs + 1 :] = num_tokens


def _pad(field: npt.NDArray[np.generic], values: Indices, padding: int) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding
