"""The interface of KV memories, and paged memory: pools that are divided into blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gpu_worker.kv.block_pools import BlockPools
from gpu_worker.kv.cache_types import type_name
from gpu_worker.kv.premap_demand import PremapDemand
from gpu_worker.kv.zeroed_memory import zeroed
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.step.token_placement import Placement
from kernels.block_packing import unpacked_views
from kernels.interface import LayerCache
from shared.codec import IntArray
from shared.errors import SettingsError
from shared.messages.leases import KVGeometry


@dataclass(frozen=True, slots=True)
class MappingStats:
    """Statistics of mapping blocks into the address ranges of sequences.

    Attributes:
        map_s: seconds of mapping and unmapping for the last step, premapping included.
        wait_s: seconds for which the step waited; the rest overlapped with the step before.
        in_use_bytes: physical memory of resident sequences; shared blocks count once.
        num_mappings: that the operating system keeps, at most.
    """

    map_s: float
    wait_s: float
    in_use_bytes: int
    num_mappings: int


class KVMemory(Protocol):
    """Memory of keys and values: a device pool and a host pool of blocks."""

    @property
    def geometry(self) -> KVGeometry:
        """Sizes of the pools."""

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        """Each attention module's part of the device pool, indexed by the block ids of plans."""

    @property
    def caches(self) -> Mapping[nn.Module, LayerCache]:
        """The tensors that kernels write and attend over, indexed by ids from ``translate``."""

    @property
    def mapping(self) -> MappingStats | None:
        """Statistics of the last step; None where blocks are not mapped."""

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        """Begin a step: drop the sequences in slots that are not ``taken`` [capacity]."""

    def translate(self, placement: Placement) -> Placement:
        """The placement of a step in ``caches``: its block tables and slot mapping.

        Raises:
            MappingFailed: blocks cannot be mapped; other sequences are not affected.
        """

    def premap(self, demand: PremapDemand) -> None:
        """Map ahead of time what ``translate`` will need; from any thread, during a step."""

    def mark_queued(self) -> None:
        """Mark that the work on the placement translated last is queued."""

    def close(self) -> None:
        """Release the memory; its tensors must not be used any more."""

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks ``sources`` [n] to ``targets`` [n]; sources may repeat, targets may not."""

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        """Copy blocks [n] of the device pool, which may repeat, to blocks [n] of the host pool."""

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        """Copy blocks [n] of the host pool, which may repeat, to blocks [n] of the device pool."""


class PagedMemory(BlockPools):
    """Paged memory: kernels find blocks by their numbers (PagedAttention, section 4.3).

    Args:
        shapes: the model's attention layers.
        num_blocks: size of the device pool.
        block_size: tokens in a block.
        device: of the device pool.
        num_host_blocks: size of the host pool.
        layout: ``layer_major``, an allocation per layer, or ``block_major``, in which a block of
            all layers is contiguous, so that one copy swaps it.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_host_blocks: int = 0,
        layout: str = "layer_major",
    ) -> None:
        self._geometry = KVGeometry(
            num_blocks,
            block_size,
            bytes_per_block(shapes, block_size),
            num_host_blocks,
            type_name(shapes[0].dtype),
        )
        allocate = _block_major if layout == "block_major" else _layer_major
        caches = allocate(shapes, num_blocks, block_size, device)
        self._layers = {shape.module: cache for shape, cache in zip(shapes, caches, strict=True)}
        super().__init__(caches, num_host_blocks)

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        return self._layers

    @property
    def caches(self) -> Mapping[nn.Module, LayerCache]:
        return self._layers

    @property
    def mapping(self) -> None:
        return None

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        pass

    def translate(self, placement: Placement) -> Placement:
        return placement

    def premap(self, demand: PremapDemand) -> None:
        pass

    def mark_queued(self) -> None:
        pass

    def close(self) -> None:
        pass


def _layer_major(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, device: torch.device
) -> list[LayerCache]:
    found = []
    for shape in shapes:
        size = (2, num_blocks, shape.num_kv_heads, block_size)
        tensors = [*zeroed((*size, shape.head_dim), shape.dtype, device)]
        if shape.scale_bytes:
            tensors += zeroed((*size, 1), torch.float32, device)
        found.append(LayerCache.of(*tensors))
    return found


def _block_major(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, device: torch.device
) -> list[LayerCache]:
    size = bytes_per_block(shapes, block_size)
    pool = zeroed((num_blocks, size), torch.uint8, device)
    return unpacked_views(_layer_major(shapes, 1, block_size, torch.device("cpu")), pool)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int) -> int:
    """Bytes of K and V of a block over all layers."""
    return block_size * sum(shape.bytes_per_token for shape in shapes)


def check_block_size(block_size: int) -> None:
    """Refuse block sizes by which kernels cannot divide with a shift.

    Raises:
        SettingsError: not a power of two.
    """
    if block_size & (block_size - 1):
        raise SettingsError("--block-size", block_size, "must be a power of two")
