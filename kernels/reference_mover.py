"""Moves of whole blocks in plain torch, on any device: what other movers must equal."""

from collections.abc import Sequence

import torch

from kernels.checks import check_cache, check_pairs
from kernels.interface import LayerCache
from kernels.packing import bytes_per_block, check_packed, unpacked_views
from kernels.reference import movable


class ReferenceMover:
    """Two indexed copies per layer.

    Args:
        layers: the pool, in the order in which packed blocks hold the layers.

    Raises:
        ValueError: if a layer is not a cache.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        for cache in layers:
            check_cache(cache)
        self._layers = tuple(layers)
        self.bytes_per_block = bytes_per_block(layers)

    def copy(
        self,
        sources: torch.Tensor,  # [P] int64, may repeat
        targets: torch.Tensor,  # [P] int64, all different, none of them a source
    ) -> None:
        """Copy blocks inside the pool."""
        check_pairs(sources, targets)
        _move(self._layers, sources, self._layers, targets)

    def pack(
        self,
        sources: torch.Tensor,  # [P] int64, blocks of the pool, may repeat
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, all different
    ) -> None:
        """Copy blocks of the pool into rows of ``packed``."""
        check_pairs(sources, rows)
        check_packed(packed, self._layers)
        _move(self._layers, sources, unpacked_views(self._layers, packed), rows)

    def unpack(
        self,
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, may repeat
        targets: torch.Tensor,  # [P] int64, blocks of the pool, all different
    ) -> None:
        """Copy rows of ``packed`` into blocks of the pool."""
        check_pairs(rows, targets)
        check_packed(packed, self._layers)
        _move(unpacked_views(self._layers, packed), rows, self._layers, targets)


def _move(
    source_layers: Sequence[LayerCache],
    sources: torch.Tensor,  # [P] int64
    target_layers: Sequence[LayerCache],
    targets: torch.Tensor,  # [P] int64
) -> None:
    for source, target in zip(source_layers, target_layers, strict=True):
        for old, new in ((source.key, target.key), (source.value, target.value)):
            picked = movable(old).index_select(0, sources.to(old.device)).to(new.device)
            movable(new).index_copy_(0, targets.to(new.device), picked)
