"""Blocks in the host's memory: where swapped sequences wait (PagedAttention, section 4.5)."""

from collections.abc import Iterator, Sequence

import torch

from gpu_worker.model import LayerShape
from gpu_worker.zeroed import zeroed
from kernels.interface import LayerCache

# On a GPU, blocks are collected in memory that activations may need as well.
_STAGING_BYTES = 64 * 2**20


class HostPool:
    """A block lies in one piece here, all layers of it, unlike in the device pool.

    So a GPU's copy engine moves a whole block at once. The layers' shares are views, and look
    like those of the device pool.

    Args:
        shapes: the model's attention layers.
        device_layers: the device pool, in the order of ``shapes``.
        num_blocks: size of the pool.
        block_size: tokens in a block.
        device: where the device pool lies.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        device_layers: Sequence[LayerCache],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._block_size = block_size
        self._device = device
        self._device_layers = device_layers
        self._in_place = device.type == "cpu"  # one copy leads from pool to pool
        bytes_each = block_size * sum(shape.bytes_per_token for shape in shapes)
        size = (num_blocks, bytes_each)
        if device.type == "cpu":
            self._blocks = zeroed(size, torch.uint8, device)
        else:  # only pinned memory can be copied from and to while the GPU's stream goes on
            self._blocks = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self._staged_at_once = max(1, _STAGING_BYTES // bytes_each)
        self.layers = self._views(self._blocks)

    def swap_out(
        self,
        sources: torch.Tensor,  # [n] int64, blocks of the device pool, may repeat
        targets: torch.Tensor,  # [n] int64, blocks of this pool, all different
    ) -> None:
        """Keep the content of blocks of the device pool."""
        if self._in_place:
            _copy(self._device_layers, sources, self.layers, targets)
            return
        # All of it is queued in one stream: what is swapped in later finds what was swapped out.
        for some, hosts in self._staged(sources, targets):
            staging = self._staging(len(hosts))
            everywhere = torch.arange(len(hosts), device=self._device)
            _copy(self._device_layers, some.to(self._device), self._views(staging), everywhere)
            for row, host in enumerate(hosts.tolist()):
                self._blocks[host].copy_(staging[row], non_blocking=True)

    def swap_in(
        self,
        sources: torch.Tensor,  # [n] int64, blocks of this pool, may repeat
        targets: torch.Tensor,  # [n] int64, blocks of the device pool, all different
    ) -> None:
        """Bring content back to blocks of the device pool."""
        if self._in_place:
            _copy(self.layers, sources, self._device_layers, targets)
            return
        for hosts, some in self._staged(sources, targets):
            staging = self._staging(len(hosts))
            for row, host in enumerate(hosts.tolist()):
                staging[row].copy_(self._blocks[host], non_blocking=True)
            everywhere = torch.arange(len(hosts), device=self._device)
            _copy(self._views(staging), everywhere, self._device_layers, some.to(self._device))

    def _staged(
        self, sources: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at_once = self._staged_at_once
        return zip(torch.split(sources, at_once), torch.split(targets, at_once), strict=True)

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Memory of the GPU for whole blocks, [num_blocks, bytes of a block] uint8."""
        shape = (num_blocks, self._blocks.shape[1])
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def _views(self, blocks: torch.Tensor) -> list[LayerCache]:
        """Each layer's share of whole blocks [n, bytes of a block]."""
        found, first = [], 0
        for shape in self._shapes:
            last = first + self._block_size * shape.bytes_per_token
            pool = blocks[:, first:last].view(shape.dtype)
            # [n, K and V, Hkv, block_size, D]
            pool = pool.view(-1, 2, shape.num_kv_heads, self._block_size, shape.head_dim)
            found.append(LayerCache(key=pool[:, 0], value=pool[:, 1]))
            first = last
        return found


def _copy(
    source_layers: Sequence[LayerCache],
    sources: torch.Tensor,  # [n] int64
    target_layers: Sequence[LayerCache],
    targets: torch.Tensor,  # [n] int64
) -> None:
    """Copy blocks of all layers between pools on one device."""
    for source, target in zip(source_layers, target_layers, strict=True):
        target.key.index_copy_(0, targets, source.key.index_select(0, sources))
        target.value.index_copy_(0, targets, source.value.index_select(0, sources))
