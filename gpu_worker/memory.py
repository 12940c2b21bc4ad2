"""The KV pool: one allocation per layer, cut into blocks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from gpu_worker.model import LayerShape
from kernels.interface import LayerCache
from shared.errors import SettingsError
from shared.messages import KVGeometry


class KVMemory(Protocol):
    """Where keys and values lie."""

    @property
    def geometry(self) -> KVGeometry:
        """Size of the pool."""

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        """The pool's part of each attention module."""


class PagedMemory:
    """Blocks are numbered pages of one pool (PagedAttention, section 4.3).

    Args:
        shapes: the model's attention layers.
        num_blocks: size of the pool.
        block_size: tokens in a block.
        device: where the pool lies.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._geometry = KVGeometry(num_blocks, block_size, bytes_per_block(shapes, block_size))
        self._layers: dict[nn.Module, LayerCache] = {}
        for shape in shapes:
            # zeros, not empty: on CPUs the pages come from the system zeroed anyway, when touched.
            pool = torch.zeros(
                (2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim),
                dtype=shape.dtype,
                device=device,
            )
            self._layers[shape.module] = LayerCache(key=pool[0], value=pool[1])

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def layers(self) -> Mapping[nn.Module, LayerCache]:
        return self._layers


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
