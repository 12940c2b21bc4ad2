"""Copies blocks inside the device pool, and swaps them to and from the host pool."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.kv.zeroed_memory import zeroed
from kernels.block_packing import bytes_per_block
from kernels.block_swap import BlockSwapper
from kernels.interface import LayerCache
from kernels.select import select_mover
from shared.codec import IntArray


class BlockPools:
    """The device pool, and the host pool for swapped sequences (PagedAttention, section 4.5).

    A block of the host pool holds all layers contiguously. On a GPU all copies are queued in one
    stream, so that a swap in reads what an earlier swap out has written.

    Args:
        layers: the device pool.
        num_host_blocks: size of the host pool.
    """

    def __init__(self, layers: Sequence[LayerCache], num_host_blocks: int) -> None:
        self._device = layers[0].key.device
        host = _host_pool((num_host_blocks, bytes_per_block(layers)), self._device)
        self._mover = select_mover(layers)
        self._swapper = BlockSwapper(layers, self._mover, host)

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks ``sources`` [n] to ``targets`` [n]; sources may repeat, targets may not.

        One call or launch copies all pairs in all layers (copy-on-write: PagedAttention, section
        4.4).
        """
        device = self._device
        self._mover.copy(_on(device, sources), _on(device, targets))

    def swap_out(self, device_blocks: IntArray, host_blocks: IntArray) -> None:
        """Copy blocks [n] of the device pool, which may repeat, to blocks [n] of the host pool."""
        self._swapper.swap_out(_index(device_blocks), _index(host_blocks))

    def swap_in(self, host_blocks: IntArray, device_blocks: IntArray) -> None:
        """Copy blocks [n] of the host pool, which may repeat, to blocks [n] of the device pool."""
        self._swapper.swap_in(_index(host_blocks), _index(device_blocks))


def _host_pool(size: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Bytes in host memory [num_blocks, bytes per block] for swaps from and to a device."""
    if device.type == "cuda":  # only pinned memory can be copied while the GPU's stream goes on
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return zeroed(size, torch.uint8, device)


def _index(blocks: IntArray) -> torch.Tensor:
    """Block ids [n] int64, on the CPU."""
    return torch.from_numpy(blocks.astype(np.int64))


def _on(device: torch.device, blocks: IntArray) -> torch.Tensor:
    """Block ids [n] int64, on the device; the copy does not wait for earlier work."""
    return _index(blocks).to(device, non_blocking=True)
