"""Times paged attention on this CPU against a gather and torch's attention.

Run with ``python -m benchmarks.micro.cpu_attention``. Times are medians; only ratios of one run
are meaningful on a machine that does other work too.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.cpu.attention.backend import CpuBackend
from kernels.interface import AttentionParams, LayerCache, RaggedBatch

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of equal length: ``query_len`` rows over ``context_len`` tokens each."""

    num_seqs: int
    query_len: int
    context_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


CASES = (
    Case(64, 1, 200, 12, 12, 64),
    Case(16, 1, 200, 12, 12, 64),
    Case(1, 1, 200, 12, 12, 64),
    Case(8, 1, 4096, 32, 8, 128),
    Case(1, 512, 512, 12, 12, 64),
    Case(1, 512, 2048, 32, 8, 128),
)


def main() -> None:
    """Print one line per case and type."""
    backend = CpuBackend()
    for dtype in (torch.bfloat16, torch.float32):
        for case in CASES:
            print(f"{str(dtype)[6:]:9} {case}: {_compare(backend, case, dtype)}")


def _compare(backend: CpuBackend, case: Case, dtype: torch.dtype) -> str:
    cache, batch, query = _prepare(case, dtype)
    out = torch.empty_like(query)
    params = AttentionParams(scale=case.head_dim**-0.5)
    paged_ms = _median_ms(lambda: backend.attend(query, cache, batch, params, out))
    gather_ms = _median_ms(lambda: _gather_and_attend(case, cache, batch, query))
    theirs = _gather_and_attend(case, cache, batch, query)
    error = (theirs.float() - out.float()).abs().max().item()
    return (
        f"paged {paged_ms:.2f} ms, gather + SDPA {gather_ms:.2f} ms, "
        f"{gather_ms / paged_ms:.1f} x, largest difference {error:.1e}"
    )


def _prepare(case: Case, dtype: torch.dtype) -> tuple[LayerCache, RaggedBatch, torch.Tensor]:
    blocks_each = -(-case.context_len // BLOCK_SIZE)
    num_blocks = case.num_seqs * blocks_each
    pool = torch.randn(2, num_blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim).to(dtype)
    tables = torch.randperm(num_blocks).to(torch.int32).view(case.num_seqs, blocks_each)
    num_tokens = case.num_seqs * case.query_len
    batch = RaggedBatch(
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        block_tables=tables,
        context_lens=torch.full((case.num_seqs,), case.context_len, dtype=torch.int32),
        query_starts=torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32),
        max_query_len=case.query_len,
        max_context_len=case.context_len,
    )
    query = torch.randn(num_tokens, case.num_heads, case.head_dim).to(dtype)
    return LayerCache(pool[0], pool[1]), batch, query


def _gather_and_attend(
    case: Case, cache: LayerCache, batch: RaggedBatch, query: torch.Tensor
) -> torch.Tensor:
    """Gather the blocks, then use dense attention, as a server without paged kernels does."""
    keys, values = (
        pool[batch.block_tables.long()]  # [S, blocks, Hkv, block_size, D]
        .transpose(1, 2)
        .reshape(case.num_seqs, case.num_kv_heads, -1, case.head_dim)[:, :, : case.context_len]
        for pool in (cache.key, cache.value)
    )
    rows = query.view(case.num_seqs, case.query_len, case.num_heads, case.head_dim).transpose(1, 2)
    positions = torch.arange(case.context_len - case.query_len, case.context_len)
    mask = torch.arange(case.context_len)[None, :] <= positions[:, None]
    attended = scaled_dot_product_attention(
        rows,
        keys,
        values,
        attn_mask=None if case.query_len == 1 else mask,
        enable_gqa=case.num_heads != case.num_kv_heads,
    )
    return attended.transpose(1, 2).reshape(query.shape)


def _median_ms(run: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
