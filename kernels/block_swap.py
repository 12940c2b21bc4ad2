"""Swapping: blocks of the pool out to the host's memory and back (PagedAttention, §4.5)."""

from collections.abc import Iterator, Sequence

import torch

from kernels.block_packing import check_packed, whole_blocks
from kernels.checks import check_pairs
from kernels.interface import BlockMover, LayerCache


class BlockSwapper:
    """Copies blocks between a pool and packed blocks in the host's memory.

    With a block-major pool a block is one copy of bytes by the copy engine; consecutive blocks are
    copied together. With any other pool the mover reads or writes the host's memory, which has to
    be pinned on a GPU. All copies are queued in the current stream.

    Args:
        layers: the pool.
        mover: moves the same layers.
        host: packed blocks, [n, bytes_per_block] uint8.

    Raises:
        ValueError: if ``host`` does not hold packed blocks.
    """

    def __init__(self, layers: Sequence[LayerCache], mover: BlockMover, host: torch.Tensor) -> None:
        check_packed(host, layers)
        self._device = layers[0].key.device
        self._mover = mover
        self._host = host
        self._whole = whole_blocks(layers)

    def swap_out(
        self,
        sources: torch.Tensor,  # [P] int64 on the CPU, blocks of the pool, may repeat
        targets: torch.Tensor,  # [P] int64 on the CPU, blocks of the host, all different
    ) -> None:
        """Copy blocks of the pool to the host."""
        check_pairs(sources, targets)
        if self._whole is None:
            self._mover.pack(self._on_device(sources), self._host, self._on_device(targets))
            return
        for source, target, count in runs(sources.tolist(), targets.tolist()):
            self._host[target : target + count].copy_(
                self._whole[source : source + count], non_blocking=True
            )

    def swap_in(
        self,
        sources: torch.Tensor,  # [P] int64 on the CPU, blocks of the host, may repeat
        targets: torch.Tensor,  # [P] int64 on the CPU, blocks of the pool, all different
    ) -> None:
        """Copy blocks of the host to the pool."""
        check_pairs(sources, targets)
        if self._whole is None:
            self._mover.unpack(self._host, self._on_device(sources), self._on_device(targets))
            return
        for source, target, count in runs(sources.tolist(), targets.tolist()):
            self._whole[target : target + count].copy_(
                self._host[source : source + count], non_blocking=True
            )

    def _on_device(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.to(self._device, non_blocking=True)


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First source, first target and length of stretches that are consecutive in both lists."""
    begin = 0
    for end in range(1, len(sources) + 1):
        goes_on = (
            end < len(sources)
            and sources[end] == sources[end - 1] + 1
            and targets[end] == targets[end - 1] + 1
        )
        if not goes_on:
            yield sources[begin], targets[begin], end - begin
            begin = end
