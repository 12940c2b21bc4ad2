"""Moves of whole blocks on CPUs: one kernel call for all layers."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.block_packing import unpacked_views
from kernels.checked_block_mover import CheckedMover
from kernels.cpu.blocks import move_arguments as fields
from kernels.cpu.blocks.block_move_kernel import move_kernel
from kernels.cpu.runtime.thread_team import ThreadTeam
from kernels.interface import LayerCache

# Less than this is moved by the calling thread: waking the others would take longer.
_SERIAL_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Packed:
    """Arguments of moves between the pool and the packed blocks at an address."""

    address: int
    pack: torch.Tensor  # [A, TENSOR_FIELDS] int64
    unpack: torch.Tensor  # [A, TENSOR_FIELDS] int64


class CpuMover(CheckedMover):
    """Copies blocks as bytes; what is contiguous on both sides is copied in one piece.

    Args:
        layers: the pool, in the order in which packed blocks hold the layers.

    Raises:
        ValueError: if a layer is not a cache.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        super().__init__(layers)
        self._team = ThreadTeam()
        self._within = _tensor_fields(layers, layers)
        self._last = _Packed(0, self._within, self._within)

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._move(self._within, sources, targets)

    def _pack(self, sources: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor) -> None:
        self._move(self._packed(packed).pack, sources, rows)

    def _unpack(self, packed: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
        self._move(self._packed(packed).unpack, rows, targets)

    def _packed(self, packed: torch.Tensor) -> _Packed:
        """Arguments for these packed blocks; those of the last call are kept."""
        if self._last.address != packed.data_ptr():
            views = unpacked_views(self._layers, packed)
            both = _tensor_fields(self._layers, views), _tensor_fields(views, self._layers)
            self._last = _Packed(packed.data_ptr(), *both)
        return self._last

    def _move(self, tensors: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        args = (ctypes.c_int64 * fields.MOVE_LAYOUT.num_fields)()
        args[fields.TENSORS] = tensors.data_ptr()
        args[fields.NUM_TENSORS] = len(tensors)
        args[fields.SOURCES] = sources.data_ptr()
        args[fields.TARGETS] = targets.data_ptr()
        args[fields.NUM_PAIRS] = len(sources)
        num_bytes = len(sources) * self.bytes_per_block
        threads = 1 if num_bytes < _SERIAL_BYTES else self._team.num_threads()
        self._team.run(move_kernel(), ctypes.addressof(args), threads)


def _tensor_fields(sources: Sequence[LayerCache], targets: Sequence[LayerCache]) -> torch.Tensor:
    """The kernel's arguments of each tensor, [A, TENSOR_FIELDS] int64."""
    return torch.tensor(
        [
            _tensor(source, target)
            for old, new in zip(sources, targets, strict=True)
            for source, target in zip(old.tensors, new.tensors, strict=True)
        ],
        dtype=torch.int64,
    )


def _tensor(
    source: torch.Tensor,  # [n, Hkv, block_size, D]
    target: torch.Tensor,  # [n', Hkv, block_size, D]
) -> list[int]:
    size = source.element_size()
    (from_block, *old), (to_block, *new) = (
        [stride * size for stride in tensor.stride()[:3]] for tensor in (source, target)
    )
    _, outer, inner, head_dim = source.shape
    piece = head_dim * size
    if old[1] == new[1] == piece:  # tokens of a head follow each other
        piece, inner = piece * inner, 1
    elif old[0] == new[0] == piece:  # heads of a token do: let those be the inner ones
        outer, inner = inner, 1
        piece *= source.shape[1]
        old.reverse()
        new.reverse()
    if inner == 1 and old[0] == new[0] == piece:
        piece, outer = piece * outer, 1
    here = (source.data_ptr(), from_block, *old)
    there = (target.data_ptr(), to_block, *new)
    return [*here, *there, outer, inner, piece]
