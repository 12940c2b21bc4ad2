"""The KV slots and block tables of one step's tokens, on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import Indices, Rows
from gpu_worker.batch.sequence_arrays import SlotArrays
from kernels.interface import RaggedBatch

# Block tables of which no more than this share is used are sent one after the other.
_SPARSE = 0.25


@dataclass(frozen=True, slots=True)
class Placement:
    """Sequences of a step, their blocks, and the KV slots of their new tokens.

    Block ids and KV slots are those of the plan until a KV memory has translated them.
    """

    slots: Indices  # [S] batch slot of each sequence
    sizes: Indices | None  # [S] new tokens of each sequence; None: one each
    positions: Indices  # [T]
    context_lens: Indices  # [S] tokens with K/V, this step's included
    num_blocks: Indices  # [S] blocks that each sequence has
    block_tables: npt.NDArray[np.int32]  # [S, C]; entries past a sequence's blocks are garbage
    slot_mapping: Indices  # [T] KV slots: block id * block size + offset in the block

    @classmethod
    def of(cls, arrays: SlotArrays, rows: Rows, block_size: int) -> "Placement":
        """The placement of a step's rows, by the block tables of their sequences."""
        num_blocks = arrays.block_capacity[rows.slots] // block_size
        width = int(num_blocks.max())
        return cls(
            slots=rows.slots,
            sizes=rows.sizes,
            positions=rows.positions,
            context_lens=rows.positions + 1
            if rows.sizes is None
            else arrays.num_computed[rows.slots] + rows.sizes,
            num_blocks=num_blocks,
            block_tables=np.take(arrays.block_tables[:, :width], rows.slots, axis=0),
            slot_mapping=rows.slot_mapping,
        )

    @property
    def owners(self) -> Indices:
        """The batch slot [T] of each token's sequence."""
        return self.slots if self.sizes is None else np.repeat(self.slots, self.sizes)

    @property
    def table_lens(self) -> Indices:
        """Used entries [S] of each block table."""
        return np.minimum(self.num_blocks, self.block_tables.shape[1])

    @property
    def is_sparse(self) -> bool:
        """Whether most entries of the block tables are beyond their sequences' blocks."""
        return int(self.table_lens.sum()) <= _SPARSE * self.block_tables.size

    def ragged(self, device: torch.device) -> RaggedBatch:
        """The batch description for kernels, on a device."""
        starts = np.zeros(len(self.slots) + 1, np.int32)
        if self.sizes is None:
            starts[:] = np.arange(len(starts))
        else:
            np.cumsum(self.sizes, out=starts[1:])
        return RaggedBatch(
            slot_mapping=torch.from_numpy(self.slot_mapping).to(device),
            block_tables=torch.from_numpy(self.block_tables).to(device),
            context_lens=torch.from_numpy(self.context_lens.astype(np.int32)).to(device),
            query_starts=torch.from_numpy(starts).to(device),
            max_query_len=1 if self.sizes is None else int(self.sizes.max()),
            max_context_len=int(self.context_lens.max()),
        )


def write_flat_tables(
    placement: Placement,
    out: npt.NDArray[np.int32],  # [at least 1 + rows + used entries]
    num_rows: int,  # S and padding
) -> int:
    """Write where each table begins, [rows + 1], and then the used entries; returns their number.

    One long sequence beside many short ones would else fill a column for each of its blocks.
    """
    lens = placement.table_lens
    num_seqs, starts = len(lens), out[: num_rows + 1]
    starts[0] = 0
    np.cumsum(lens, out=starts[1 : num_seqs + 1])
    starts[num_seqs + 1 :] = starts[num_seqs]
    num_used = int(starts[num_seqs])
    end = num_rows + 1 + num_used
    row = np.repeat(np.arange(num_seqs), lens)
    column = np.arange(num_used) - np.repeat(starts[:num_seqs], lens)
    out[num_rows + 1 : end] = placement.block_tables[row, column]
    return end


def spread_tables(
    flat: torch.Tensor,  # [entries] int32, as written by ``write_flat_tables``
    num_rows: int,
    width: int,
) -> torch.Tensor:
    """Block tables [rows, width] on the device; entries past a sequence's blocks are others'."""
    column = torch.arange(num_rows + 1, num_rows + 1 + width, dtype=torch.int32, device=flat.device)
    place = (flat[:num_rows, None] + column).clamp_(max=len(flat) - 1)
    return flat.index_select(0, place.view(-1)).view(num_rows, width)
