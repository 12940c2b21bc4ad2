"""The base of all movers of whole blocks: checks arguments before anything is moved."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from kernels.block_packing import bytes_per_block, check_packed
from kernels.checks import check_cache, check_pairs
from kernels.interface import LayerCache


class CheckedMover(ABC):
    """A ``BlockMover`` that checks arguments; subclasses copy.

    Args:
        layers: the pool, in the order in which packed blocks hold the layers.

    Raises:
        ValueError: if a layer is not a cache; of the methods, if their arguments do not fit.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        for cache in layers:
            check_cache(cache)
        self._layers = tuple(layers)  # also owns the memory at addresses
        self.bytes_per_block = bytes_per_block(layers)

    def copy(
        self,
        sources: torch.Tensor,  # [P] int64, may repeat
        targets: torch.Tensor,  # [P] int64, all different, none of them a source
    ) -> None:
        """Copy blocks inside the pool (copy-on-write: PagedAttention, section 4.4)."""
        check_pairs(sources, targets)
        self._copy(sources, targets)

    def pack(
        self,
        sources: torch.Tensor,  # [P] int64, blocks of the pool, may repeat
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, all different
    ) -> None:
        """Copy blocks of the pool into rows of ``packed``."""
        check_pairs(sources, rows)
        check_packed(packed, self._layers)
        self._pack(sources, packed, rows)

    def unpack(
        self,
        packed: torch.Tensor,  # [n, bytes_per_block] uint8
        rows: torch.Tensor,  # [P] int64, rows of ``packed``, may repeat
        targets: torch.Tensor,  # [P] int64, blocks of the pool, all different
    ) -> None:
        """Copy rows of ``packed`` into blocks of the pool."""
        check_pairs(rows, targets)
        check_packed(packed, self._layers)
        self._unpack(packed, rows, targets)

    @abstractmethod
    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None: ...

    @abstractmethod
    def _pack(self, sources: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor) -> None: ...

    @abstractmethod
    def _unpack(self, packed: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None: ...
