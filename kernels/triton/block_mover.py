"""Moves of whole blocks on GPUs: one launch for all layers of one shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.block_packing import bytes_per_block, unpacked_views
from kernels.checked_block_mover import CheckedMover
from kernels.interface import LayerCache
from kernels.triton.block_move_kernel import move_blocks_kernel

_TILE_BYTES = 8192
_WORDS = {
    8: (tl.int64, torch.int64),
    4: (tl.int32, torch.int32),
    2: (tl.int16, torch.int16),
    1: (tl.int8, torch.int8),
}


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Keys and values of layers that agree in shape, strides and type."""

    addresses: torch.Tensor  # [A] int64, on the pool's device
    shares: torch.Tensor  # [A] int64, first word in a packed block
    word_bytes: int
    grid: tuple[int, int]  # tensors, tiles of a block's rows
    constants: dict[str, object]


class TritonMover(CheckedMover):
    """One launch per shape of layer; packed blocks may lie in pinned host memory.

    Args:
        layers: the pool, in the order in which packed blocks hold the layers.

    Raises:
        ValueError: if a layer is not a cache.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        super().__init__(layers)
        self._groups = _group(layers)

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._launch(sources, targets, None, from_packed=False, to_packed=False)

    def _pack(self, sources: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor) -> None:
        self._launch(sources, rows, packed, from_packed=False, to_packed=True)

    def _unpack(self, packed: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
        self._launch(rows, targets, packed, from_packed=True, to_packed=False)

    def _launch(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        packed: torch.Tensor | None,
        from_packed: bool,
        to_packed: bool,
    ) -> None:
        if len(sources) == 0:
            return
        for group in self._groups:
            word = _WORDS[group.word_bytes][1]
            # Without packed blocks the argument is never followed.
            words = group.addresses.view(word) if packed is None else packed.view(word)
            move_blocks_kernel[(len(sources), *group.grid)](
                group.addresses,
                sources,
                targets,
                words,
                group.shares,
                FROM_PACKED=from_packed,
                TO_PACKED=to_packed,
                PACKED_WORDS=self.bytes_per_block // group.word_bytes,
                **group.constants,
                num_warps=4,
            )


def _group(layers: Sequence[LayerCache]) -> list[_Tensors]:
    """Layers of one shape together; the order of packed blocks is that of ``layers``."""
    # As if one packed block lay at address zero: what an address is there, is its offset.
    nowhere = torch.empty((1, bytes_per_block(layers)), dtype=torch.uint8)
    found: dict[object, list[tuple[torch.Tensor, int]]] = {}
    for cache, view in zip(layers, unpacked_views(layers, nowhere), strict=True):
        for pool, share in zip(cache.tensors, view.tensors, strict=True):
            like = (pool.dtype, pool.shape, pool.stride())
            offset = share.data_ptr() - nowhere.data_ptr()
            found.setdefault(like, []).append((pool, offset))
    return [_describe(members, nowhere.shape[1]) for members in found.values()]


def _describe(members: Sequence[tuple[torch.Tensor, int]], packed_bytes: int) -> _Tensors:
    pool = members[0][0]
    _, num_kv_heads, block_size, head_dim = pool.shape
    size = pool.element_size()
    row_bytes = head_dim * size
    strides = [stride * size for stride in pool.stride()[:3]]
    addresses = [member.data_ptr() for member, _ in members]
    offsets = [offset for _, offset in members]
    aligned = math.gcd(16, row_bytes, packed_bytes, *strides, *addresses, *offsets)
    word = min(aligned, 8)
    num_rows = num_kv_heads * block_size
    tile_rows = triton.next_power_of_2(max(1, min(num_rows, _TILE_BYTES // row_bytes)))
    constants = {
        "WORD": _WORDS[word][0],
        "ALIGNED": aligned == 16,
        "NUM_ROWS": num_rows,
        "BLOCK_SIZE": block_size,
        "ROW_WORDS": row_bytes // word,
        "PADDED_WORDS": triton.next_power_of_2(row_bytes // word),
        "BLOCK_STRIDE": strides[0] // word,
        "HEAD_STRIDE": strides[1] // word,
        "SLOT_STRIDE": strides[2] // word,
        "TILE_ROWS": tile_rows,
    }
    return _Tensors(
        torch.tensor(addresses, dtype=torch.int64, device=pool.device),
        torch.tensor([offset // word for offset in offsets], device=pool.device),
        word,
        (len(members), triton.cdiv(num_rows, tile_rows)),
        constants,
    )
