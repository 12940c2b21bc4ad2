"""Virtual KV memory: blocks are mapped so that every sequence is contiguous (vAttention)."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import nn

from gpu_worker.kv.block_pools import BlockPools
from gpu_worker.kv.cache_types import type_name
from gpu_worker.kv.mapped_ranges import MappedRanges
from gpu_worker.kv.mapping import Mapper
from gpu_worker.kv.memory import MappingStats
from gpu_worker.kv.premap_demand import PremapDemand
from gpu_worker.kv.token_layout import TokenLayout
from gpu_worker.step.token_placement import Placement
from kernels.interface import LayerCache
from shared.messages.leases import KVGeometry

NUM_RESERVED = 1
"""Ranges before the first one of a sequence.

The first place of the space always has a block mapped: Triton asks the driver about the address at
which a tensor begins, and fails if nothing is mapped there.
"""


class VirtualMemory(BlockPools):
    """KV memory with a range of addresses for each batch slot, as long as the longest sequence.

    The blocks of a sequence are mapped into its range, in order; a block that several sequences
    share is mapped several times. To kernels a range is one large block, so that their block
    tables have one column.

    Args:
        layout: of tokens.
        mapper: of physical blocks; its space is a whole number of ranges, reserved ones included.
        num_blocks: size of the device pool.
        max_blocks: blocks in a range.
        num_host_blocks: size of the host pool.
    """

    def __init__(
        self,
        layout: TokenLayout,
        mapper: Mapper,
        num_blocks: int,
        max_blocks: int,
        num_host_blocks: int = 0,
    ) -> None:
        block_bytes = layout.block_bytes
        dtype = type_name(layout.shapes[0].dtype)
        self._geometry = KVGeometry(
            num_blocks, layout.block_size, block_bytes, num_host_blocks, dtype
        )
        self._mapper = mapper
        self._range_tokens = max_blocks * layout.block_size
        num_ranges = mapper.space.numel() // (max_blocks * block_bytes) - NUM_RESERVED
        mapper.map(0, 0, 1)
        first_place = NUM_RESERVED * max_blocks
        self._ranges = MappedRanges(mapper, num_ranges, max_blocks, num_blocks, first_place)
        # Guards the mappings, which the compute thread and the premapping thread change.
        self._mapping = threading.Lock()
        self._map_s = self._wait_s = self._ahead_s = 0.0
        self._stats = MappingStats(0.0, 0.0, 0, 0)
        self._layers = layout.views(mapper.pool, layout.block_size)
        self._caches = layout.views(mapper.space, self._range_tokens)
        super().__init__([self._layers[shape.module] for shape in layout.shapes], num_host_blocks)

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
        return self._stats

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        self._map_s = self._wait_s = 0.0  # a step begins
        with self._changing_now():
            self._map_s += self._ahead_s
            self._ahead_s = 0.0
            self._ranges.keep(taken)

    def translate(self, placement: Placement) -> Placement:
        with self._changing_now():
            self._ranges.map_tables(placement.slots, placement.block_tables, placement.num_blocks)
        ranges = placement.slots + NUM_RESERVED
        owners = placement.owners + NUM_RESERVED
        return replace(
            placement,
            block_tables=ranges.astype(np.int32).reshape(-1, 1),
            slot_mapping=owners * self._range_tokens + placement.positions,
        )

    def premap(self, demand: PremapDemand) -> None:
        with self._mapping:
            began = time.perf_counter()
            self._ranges.premap(demand.slots, demand.tables, demand.num_blocks)
            self._ahead_s += time.perf_counter() - began

    @contextmanager
    def _changing_now(self) -> Iterator[None]:
        """Hold the lock for changes that the step waits for, and measure their time."""
        waiting = time.perf_counter()
        with self._mapping:
            began = time.perf_counter()
            try:
                yield
            finally:
                ended = time.perf_counter()
                self._map_s += ended - began
                self._wait_s += ended - waiting
                in_use_bytes = self._ranges.num_in_use * self._geometry.bytes_per_block
                num_areas = self._ranges.num_areas
                self._stats = MappingStats(self._map_s, self._wait_s, in_use_bytes, num_areas)

    def mark_queued(self) -> None:
        self._mapper.mark_queued()

    def close(self) -> None:
        self._mapper.close()
