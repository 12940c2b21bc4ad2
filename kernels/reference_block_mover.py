"""Moves of whole blocks in plain torch, on any device: the oracle of the other movers."""

from collections.abc import Sequence

import torch

from kernels.block_packing import unpacked_views
from kernels.checked_block_mover import CheckedMover
from kernels.interface import LayerCache
from kernels.reference import movable


class ReferenceMover(CheckedMover):
    """Two indexed copies per layer."""

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        _move(self._layers, sources, self._layers, targets)

    def _pack(self, sources: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor) -> None:
        _move(self._layers, sources, unpacked_views(self._layers, packed), rows)

    def _unpack(self, packed: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
        _move(unpacked_views(self._layers, packed), rows, self._layers, targets)


def _move(
    source_layers: Sequence[LayerCache],
    sources: torch.Tensor,  # [P] int64
    target_layers: Sequence[LayerCache],
    targets: torch.Tensor,  # [P] int64
) -> None:
    for source, target in zip(source_layers, target_layers, strict=True):
        for old, new in zip(source.tensors, target.tensors, strict=True):
            picked = movable(old).index_select(0, sources.to(old.device)).to(new.device)
            movable(new).index_copy_(0, targets.to(new.device), picked)
