"""KV memory in which every sequence is contiguous: blocks are mapped, tables are not followed."""

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gpu_worker.host_pool import HostPool
from gpu_worker.mapped_ranges import MappedRanges
from gpu_worker.mapping import Mapper
from gpu_worker.memory import MappingStats, block_index
from gpu_worker.placement import Placement
from gpu_worker.token_layout import TokenLayout
from kernels.interface import LayerCache
from shared.codec import IntArray
from shared.messages import KVGeometry


class VirtualMemory:
    """Each slot of the batch owns a range of addresses, as long as a sequence can be (vAttention).

    The blocks of a plan are mapped into the range of their sequence, in order; a block that several
    sequences share is mapped several times. To kernels a range is one large block, so what they
    are given as block tables has one column.

    Args:
        layout: of tokens.
        mapper: of physical blocks; its space is a whole number of ranges.
        num_blocks: size of the device pool.
        max_blocks: blocks in a range.
        device: where both lie.
        num_host_blocks: size of the host pool.
    """

    def __init__(
        self,
        layout: TokenLayout,
        mapper: Mapper,
        num_blocks: int,
        max_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        block_bytes = layout.block_bytes
        self._geometry = KVGeometry(num_blocks, layout.block_size, block_bytes, num_host_blocks)
        self._mapper = mapper
        self._range_tokens = max_blocks * layout.block_size
        num_ranges = mapper.space.numel() // (max_blocks * block_bytes)
        self._ranges = MappedRanges(mapper, num_ranges, max_blocks, num_blocks)
        self._map_s = 0.0
        self._layers = layout.views(mapper.pool, layout.block_size)
        self._caches = layout.views(mapper.space, self._range_tokens)
        device_layers = [self._layers[shape.module] for shape in layout.shapes]
        self._host = HostPool(
            layout.shapes, device_layers, num_host_blocks, layout.block_size, device
        )

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        return self._layers

    @property
    def caches(self) -> Mapping[nn.Module, LayerCache]:
        return self._caches

    @property
    def mapping(self) -> MappingStats:
        in_use_bytes = self._ranges.num_in_use * self._geometry.bytes_per_block
        return MappingStats(self._map_s, in_use_bytes, self._ranges.num_areas)

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        self._map_s = 0.0  # a step begins
        self._ranges.keep(taken)

    def translate(self, placement: Placement) -> Placement:
        began = time.perf_counter()
        try:
            self._ranges.follow(placement.slots, placement.block_tables, placement.num_blocks)
        finally:
            self._map_s += time.perf_counter() - began
        return replace(
            placement,
            block_tables=placement.slots.astype(np.int32).reshape(-1, 1),
            slot_mapping=placement.owners * self._range_tokens + placement.positions,
        )

    def attended(self) -> None:
        self._mapper.used()

    def close(self) -> None:
        self._mapper.close()

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        self._host.swap_out(block_index(device_blocks), block_index(host_blocks))

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        self._host.swap_in(block_index(host_blocks), block_index(device_blocks))
