"""Packed blocks: the bytes of a block in all layers, layer by layer, keys first, for swapping.

A packed block is ``[layer, 2, Hkv, block_size, D]``; layers may differ in Hkv, D and type. Scales
of tokens ``[2, Hkv, block_size]`` follow behind a layer's values. A pool of that layout,
``[block, layer, 2, Hkv, block_size, D]``, is called block-major.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.interface import LayerCache


def bytes_per_block(layers: Sequence[LayerCache]) -> int:
    """Bytes of one block, keys and values of all layers."""
    return sum(_tensor_bytes(each) for cache in layers for each in cache.tensors)


def unpacked_views(
    layers: Sequence[LayerCache],
    packed: torch.Tensor,  # [n, bytes_per_block] uint8
) -> list[LayerCache]:
    """Each layer's share of packed blocks, in the shape of the pool's: [n, Hkv, block_size, D]."""
    found: list[LayerCache] = []
    first = 0
    for cache in layers:
        views = []
        for each in cache.tensors:
            size = _tensor_bytes(each)
            share = packed[:, first : first + size].view(each.dtype)
            views.append(share.view(-1, *each.shape[1:]))
            first += size
        whole = LayerCache.of(*views)
        found.append(replace(whole, key_scale=cache.key_scale, value_scale=cache.value_scale))
    return found


def whole_blocks(layers: Sequence[LayerCache]) -> torch.Tensor | None:
    """The pool as [num_blocks, bytes_per_block] uint8 if it is block-major, or None.

    Then a block is moved by one copy of bytes.
    """
    size = bytes_per_block(layers)
    first = layers[0].key
    storage = first.untyped_storage()
    begin = first.data_ptr() - storage.data_ptr()
    num_blocks = first.shape[0]
    if begin + num_blocks * size > storage.nbytes():
        return None
    pool = torch.empty(0, dtype=torch.uint8, device=first.device)
    pool.set_(storage, begin, (num_blocks, size), (size, 1))
    for cache, view in zip(layers, unpacked_views(layers, pool), strict=True):
        for ours, theirs in zip(cache.tensors, view.tensors, strict=True):
            if ours.data_ptr() != theirs.data_ptr() or ours.stride() != theirs.stride():
                return None
            if ours.shape != theirs.shape:
                return None
    return pool


def check_packed(packed: torch.Tensor, layers: Sequence[LayerCache]) -> None:
    """Rows of ``packed`` are packed blocks.

    Raises:
        ValueError: if they are not.
    """
    size = bytes_per_block(layers)
    fits = packed.dim() == 2 and packed.shape[1] == size and packed.is_contiguous()
    if not fits or packed.dtype != torch.uint8:
        raise ValueError(
            f"packed blocks {tuple(packed.shape)} {packed.dtype} {packed.stride()}: "
            f"contiguous [n, {size}] uint8 expected"
        )


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a block in one tensor of a cache."""
    return tensor[0].numel() * tensor.element_size()
