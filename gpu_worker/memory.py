"""What every KV memory does, and the paged one: an allocation per layer, cut into blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gpu_worker.host_pool import HostPool
from gpu_worker.model import LayerShape
from gpu_worker.placement import Placement
from gpu_worker.zeroed import zeroed
from kernels.interface import LayerCache
from shared.codec import IntArray
from shared.errors import SettingsError
from shared.messages import KVGeometry


@dataclass(frozen=True, slots=True)
class MappingStats:
    """Blocks that are mapped into sequences' ranges of addresses.

    Attributes:
        map_s: seconds that the last step spent on mapping and unmapping.
        in_use_bytes: physical memory that resident sequences have; what they share counts once.
        num_mappings: areas of memory that the system keeps, at most.
    """

    map_s: float
    in_use_bytes: int
    num_mappings: int


class KVMemory(Protocol):
    """Where keys and values lie."""

    @property
    def geometry(self) -> KVGeometry:
        """Size of the pools."""

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        """The device pool's part of each attention module, by the block ids of plans."""

    @property
    def caches(self) -> Mapping[nn.Module, LayerCache]:
        """What kernels write to and attend over, by the ids that ``translate`` gives."""

    @property
    def mapping(self) -> MappingStats | None:
        """What the last step changed; None where nothing is ever mapped."""

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        """Only the sequences in the slots that are ``taken`` [capacity] are still here."""

    def translate(self, placement: Placement) -> Placement:
        """Where in ``caches`` the tokens and blocks of a step lie.

        Raises:
            MappingFailed: they cannot be reached; other sequences are as they were.
        """

    def attended(self) -> None:
        """Work that reads and writes ``caches`` as last translated is queued."""

    def close(self) -> None:
        """Nobody uses this memory any more."""

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        """Copy blocks [n] of the device pool, which may repeat, to blocks [n] of the host pool."""

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        """Copy blocks [n] of the host pool, which may repeat, to blocks [n] of the device pool."""


class PagedMemory:
    """Blocks are numbered pages of one pool (PagedAttention, section 4.3).

    Args:
        shapes: the model's attention layers.
        num_blocks: size of the device pool.
        block_size: tokens in a block.
        device: where the device pool lies.
        num_host_blocks: size of the host pool.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self._geometry = KVGeometry(
            num_blocks, block_size, bytes_per_block(shapes, block_size), num_host_blocks
        )
        self._layers: dict[nn.Module, LayerCache] = {}
        for shape in shapes:
            size = (2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
            pool = zeroed(size, shape.dtype, device)
            self._layers[shape.module] = LayerCache(key=pool[0], value=pool[1])
        device_layers = [self._layers[shape.module] for shape in shapes]
        self._host = HostPool(shapes, device_layers, num_host_blocks, block_size, device)

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

    def attended(self) -> None:
        pass

    def close(self) -> None:
        pass

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        self._host.swap_out(block_index(device_blocks), block_index(host_blocks))

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        self._host.swap_in(block_index(host_blocks), block_index(device_blocks))


def block_index(blocks: IntArray) -> torch.Tensor:
    """Block ids [n] int64, on the CPU."""
    return torch.from_numpy(blocks.astype(np.int64))


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int) -> int:
    """K and V of a block over all layers."""
    return block_size * sum(shape.bytes_per_token for shape in shapes)


def check_block_size(block_size: int) -> None:
    """Refuse sizes that kernels cannot divide by with a shift.

    Raises:
        SettingsError: not a power of two.
    """
    if block_size & (block_size - 1):
        raise SettingsError("--block-size", block_size, "must be a power of two")
