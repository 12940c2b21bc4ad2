"""The KV pools: on the device one allocation per layer, cut into blocks, and on the host."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from gpu_worker.host_pool import HostPool
from gpu_worker.model import LayerShape
from kernels.interface import LayerCache
from shared.codec import IntArray
from shared.errors import SettingsError
from shared.messages import KVGeometry


class KVMemory(Protocol):
    """Where keys and values lie."""

    @property
    def geometry(self) -> KVGeometry:
        """Size of the pools."""

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        """The device pool's part of each attention module."""

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
            # zeros, not empty: on CPUs the pages come from the system zeroed anyway, when touched.
            pool = torch.zeros(
                (2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim),
                dtype=shape.dtype,
                device=device,
            )
            self._layers[shape.module] = LayerCache(key=pool[0], value=pool[1])
        device_layers = [self._layers[shape.module] for shape in shapes]
        self._host = HostPool(shapes, device_layers, num_host_blocks, block_size, device)

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        return self._layers

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        self._host.swap_out(_index(device_blocks), _index(host_blocks))

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        self._host.swap_in(_index(host_blocks), _index(device_blocks))


def _index(blocks: IntArray) -> torch.Tensor:
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
