"""Pools and batches for the kernel benchmark, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.kernels.cases import AttentionCase, PoolShape
from kernels.interface import FP8, AttentionParams, LayerCache, RaggedBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``attend``, and its keys and values as contiguous tensors."""

    case: AttentionCase
    cache: LayerCache
    batch: RaggedBatch
    params: AttentionParams
    query: torch.Tensor  # [T, H, D]
    out: torch.Tensor  # [T, H, D]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [S, Hkv, longest context, D], zero after each sequence's end."""
        longest = self.batch.max_context_len
        shape = (len(self.case.sequences), self.case.num_kv_heads, longest, self.case.head_dim)
        found = []
        for pool in (self.cache.key, self.cache.value):
            dense = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
            for sequence, (_, context) in enumerate(self.case.sequences):
                blocks = -(-context // self.case.block_size)
                table = self.batch.block_tables[sequence, :blocks].long()
                rows = pool[table].transpose(0, 1).reshape(shape[1], -1, shape[3])
                dense[sequence, :, :context] = rows[:, :context]
            found.append(dense)
        return found[0], found[1]


def make_step(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> Step:
    """Random keys and values in blocks in random order."""
    counts = [-(-context // case.block_size) for _, context in case.sequences]
    total = sum(counts)
    stored = FP8 if case.quantized else dtype
    cache = _random_cache(case, total, stored, device)
    order = torch.randperm(total, device=device).to(torch.int32)
    tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
    first = 0
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = order[first : first + count]
        first += count
    rows = torch.tensor([0, *(rows for rows, _ in case.sequences)])
    contexts = [context for _, context in case.sequences]
    batch = RaggedBatch(
        slot_mapping=torch.zeros(case.num_rows, dtype=torch.int64, device=device),
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_starts=rows.cumsum(0).to(torch.int32).to(device),
        max_query_len=max(rows for rows, _ in case.sequences),
        max_context_len=max(contexts),
    )
    size = (case.num_rows, case.num_heads, case.head_dim)
    query = torch.randn(size, device=device).to(dtype)
    out = torch.full(size, float("nan"), device=device, dtype=dtype)
    return Step(case, cache, batch, AttentionParams(case.head_dim**-0.5), query, out)


def make_layers(shape: PoolShape, layout: str, device: torch.device) -> list[LayerCache]:
    """A pool of all layers in one of the layouts, of random 16-bit elements."""
    n, layers, h, b, d = (
        shape.num_blocks,
        shape.num_layers,
        shape.num_kv_heads,
        shape.block_size,
        shape.head_dim,
    )
    pools: Sequence[torch.Tensor]
    if layout == "layer_major":
        pools = [_random((2, n, h, b, d), torch.bfloat16, device) for _ in range(layers)]
    elif layout == "block_major":
        pool = _random((n, layers, 2, h, b, d), torch.bfloat16, device)
        pools = pool.permute(1, 2, 0, 3, 4, 5).unbind()
    else:
        pool = _random((n, b, layers, 2, h, d), torch.bfloat16, device)
        pools = pool.permute(2, 3, 0, 4, 1, 5).unbind()
    return [LayerCache(pool[0], pool[1]) for pool in pools]


def _random_cache(
    case: AttentionCase, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """One layer; in the other layouts as part of a pool of four, for realistic strides."""
    n, h, b, d = num_blocks, case.num_kv_heads, case.block_size, case.head_dim
    if case.layout == "layer_major":
        pool = _random((2, n, h, b, d), dtype, device)
    elif case.layout == "block_major":
        pool = _random((n, 4, 2, h, b, d), dtype, device)[:, 1].transpose(0, 1)
    else:
        pool = _random((n, b, 4, 2, h, d), dtype, device)[:, :, 1].permute(2, 0, 3, 1, 4)
    scales = (0.5, 0.5) if dtype == FP8 else (1.0, 1.0)
    return LayerCache(pool[0], pool[1], *scales)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed numbers, made in parts: the whole in float32 would be too large."""
    found = torch.empty(tuple(shape), dtype=dtype, device=device)
    for part in torch.split(found.view(-1), 2**26):
        part.copy_(torch.randn(part.shape, device=device))
    return found
