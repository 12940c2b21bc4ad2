"""Checks of shapes and types, shared by the backends, so that shape comments hold.

Kernels get raw addresses: a wrong type there is a wild read, not an exception. So every argument is
checked here first.
"""

import torch

from kernels.interface import FP8, INT8, LayerCache, RaggedBatch, may_hold


def check_cache(cache: LayerCache) -> None:
    """Keys and values agree in shape and type, and the last dimension is contiguous.

    Raises:
        ValueError: if they do not.
    """
    key, value = cache.key, cache.value
    if key.dim() != 4 or key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key {tuple(key.shape)} {key.dtype} and value {tuple(value.shape)} {value.dtype} "
            "are not one cache [num_blocks, Hkv, block_size, D]"
        )
    if key.stride(3) != 1 or value.stride(3) != 1:
        raise ValueError(f"cache strides {key.stride()} {value.stride()}: D must be contiguous")
    scales = (cache.key_scale, cache.value_scale)
    if min(scales) <= 0 or (scales != (1.0, 1.0) and key.dtype != FP8):
        raise ValueError(f"scales {scales} of a cache of {key.dtype}")
    expected = (*key.shape[:3], 1) if key.dtype == INT8 else None
    for each in (cache.key_scales, cache.value_scales):
        found = None if each is None else tuple(each.shape)
        if found != expected or (each is not None and each.dtype != torch.float32):
            kind = None if each is None else each.dtype
            raise ValueError(
                f"scales of tokens {found} {kind} of a cache of {key.dtype}: {expected} expected, "
                "in float32"
            )


def check_write(
    key: torch.Tensor,  # [T, Hkv, D]
    value: torch.Tensor,  # [T, Hkv, D]
    cache: LayerCache,
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """The new keys and values fit the cache and there is a slot for each token.

    Raises:
        ValueError: if they do not.
    """
    check_cache(cache)
    _, num_kv_heads, _, head_dim = cache.key.shape
    expected = (slot_mapping.shape[0], num_kv_heads, head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} are not {expected}"
        )
    if not may_hold(cache.dtype, key.dtype) or value.dtype != key.dtype:
        raise ValueError(f"key {key.dtype}, value {value.dtype}, cache {cache.key.dtype}")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(f"strides {key.stride()} {value.stride()}: D must be contiguous")
    _check_vector("slot_mapping", slot_mapping, torch.int64)


def check_pairs(
    sources: torch.Tensor,  # [P] int64
    targets: torch.Tensor,  # [P] int64
) -> None:
    """There is a target for each source; block ids are the caller's to check.

    Raises:
        ValueError: if there is not.
    """
    _check_vector("sources", sources, torch.int64)
    _check_vector("targets", targets, torch.int64)
    if sources.shape != targets.shape:
        raise ValueError(f"{sources.shape[0]} sources and {targets.shape[0]} targets")


def check_attend(
    query: torch.Tensor,  # [T, H, D]
    cache: LayerCache,
    batch: RaggedBatch,
    out: torch.Tensor,  # [T, H, D]
) -> None:
    """Query, output and batch fit each other and the cache.

    Raises:
        ValueError: if they do not.
    """
    check_cache(cache)
    _, num_kv_heads, _, head_dim = cache.key.shape
    if query.dim() != 3 or query.shape != out.shape or query.shape[2] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} and out {tuple(out.shape)} are not [T, H, D={head_dim}]"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"{query.shape[1]} query heads do not share {num_kv_heads} KV heads")
    if not may_hold(cache.dtype, query.dtype) or out.dtype != query.dtype:
        raise ValueError(f"query {query.dtype}, out {out.dtype}, cache {cache.key.dtype}")
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"strides {query.stride()} {out.stride()}: D must be contiguous")
    check_batch(batch)


def check_rotary(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, Hkv, D]
    cos: torch.Tensor,  # [T, Dr]
    sin: torch.Tensor,  # [T, Dr]
) -> None:
    """Queries, keys, cosines and sines fit each other; Dr is at most D.

    Raises:
        ValueError: if they do not.
    """
    num_tokens, _, head_dim = query.shape
    if key.shape != (num_tokens, key.shape[1], head_dim):
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit")
    fits = cos.dim() == 2 and cos.shape == sin.shape and len(cos) == num_tokens
    if not fits or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for D {head_dim}")
    if query.dtype != key.dtype:
        raise ValueError(f"query {query.dtype} and key {key.dtype} do not fit")
    if not query.stride(2) == key.stride(2) == cos.stride(1) == sin.stride(1) == 1:
        raise ValueError("D must be contiguous")


def check_batch(batch: RaggedBatch) -> None:
    """There are a length, a start and a block table for each sequence.

    Raises:
        ValueError: if there are not.
    """
    num_seqs = batch.context_lens.shape[0]
    if batch.query_starts.shape[0] != num_seqs + 1 or batch.block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"{num_seqs} context lengths, {batch.query_starts.shape[0]} query starts, "
            f"{batch.block_tables.shape[0]} block tables"
        )
    _check_vector("context_lens", batch.context_lens, torch.int32)
    _check_vector("query_starts", batch.query_starts, torch.int32)
    if batch.block_tables.dtype != torch.int32 or batch.block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables {batch.block_tables.dtype} {batch.block_tables.stride()}: "
            "int32 with contiguous rows expected"
        )


def check_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """There is a slot for each token.

    Raises:
        ValueError: if there is not.
    """
    _check_vector("slot_mapping", slot_mapping, torch.int64)
    if slot_mapping.shape[0] != num_tokens:
        raise ValueError(f"{slot_mapping.shape[0]} slots for {num_tokens} tokens")


def check_indices(name: str, indices: torch.Tensor, num_tokens: int) -> None:
    """There is an index for each token; the indices themselves are not checked.

    Raises:
        ValueError: if there is not.
    """
    _check_vector(name, indices, torch.int64)
    if indices.shape[0] != num_tokens:
        raise ValueError(f"{indices.shape[0]} {name} for {num_tokens} tokens")


def _check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}: "
            f"a contiguous vector of {dtype} expected"
        )
