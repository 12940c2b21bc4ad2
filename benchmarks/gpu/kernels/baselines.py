"""Other implementations of attention, with torch alone.

Each one prepares its inputs before it is timed, and returns a call whose result is [T, H, D].
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.kernels.pools import Step
from kernels.interface import AttentionBackend, LayerCache, RaggedBatch

Attend = Callable[[], torch.Tensor]


def contiguous_kernel(step: Step, backend: AttentionBackend) -> Attend:
    """Our own kernel over one block per sequence: shows the cost of following block tables."""
    keys, values = step.dense()
    # Larger than any real block, so that the kernel treats it as contiguous memory.
    room = max(0, 1100 - keys.shape[2])
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in (keys, values))
    num_seqs = keys.shape[0]
    batch = RaggedBatch(
        slot_mapping=step.batch.slot_mapping,
        block_tables=torch.arange(num_seqs, dtype=torch.int32, device=keys.device).view(-1, 1),
        context_lens=step.batch.context_lens,
        query_starts=step.batch.query_starts,
        max_query_len=step.batch.max_query_len,
        max_context_len=step.batch.max_context_len,
    )
    cache = LayerCache(keys, values, step.cache.key_scale, step.cache.value_scale)
    out = torch.full_like(step.query, float("nan"))

    def attend() -> torch.Tensor:
        backend.attend(step.query, cache, batch, step.params, out)
        return out

    return attend


def fixed_cut(step: Step, _: AttentionBackend) -> Attend:
    """Our own kernel with splits that do not depend on the batch: shows the cost of determinism."""
    from kernels.triton.backend import TritonBackend

    backend = TritonBackend(fixed_cut=True)
    out = torch.full_like(step.query, float("nan"))

    def attend() -> torch.Tensor:
        backend.attend(step.query, step.cache, step.batch, step.params, out)
        return out

    return attend


def dense_sdpa(step: Step, _: AttentionBackend) -> Attend:
    """Torch's attention over keys and values that are contiguous already."""
    keys, values = step.dense()
    return _over_dense(step, lambda: (keys, values))


def gather_sdpa(step: Step, _: AttentionBackend) -> Attend:
    """Gather the blocks, then attend, as a server without paged kernels does."""
    tables = step.batch.block_tables.long()
    longest = step.batch.max_context_len

    def gather(pool: torch.Tensor) -> torch.Tensor:
        pages = pool[tables].transpose(1, 2)  # [S, Hkv, blocks, block_size, D]
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, :longest]

    return _over_dense(step, lambda: (gather(step.cache.key), gather(step.cache.value)))


def padded_sdpa(step: Step, _: AttentionBackend) -> Attend:
    """Torch's attention over keys padded to the longest context, with a mask."""
    keys, values = step.dense()
    positions = torch.arange(keys.shape[2], device=keys.device)
    mask = positions[None, :] < step.batch.context_lens[:, None]  # [S, N]
    return _over_dense(step, lambda: (keys, values), mask[:, None, None, :])


def flex_over_pages(step: Step, _: AttentionBackend) -> Attend:
    """FlexAttention that looks its key blocks up in a block table; one sequence, one row."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    case = step.case
    num_blocks = case.sequences[0][1] // case.block_size
    if len(case.sequences) != 1 or step.case.num_rows != 1 or case.block_size % 128:
        raise ValueError("one row over blocks of a multiple of 128 is what this baseline does")
    tables = step.batch.block_tables[:, :num_blocks].view(1, 1, 1, -1)
    counts = torch.full((1, 1, 1), num_blocks, dtype=torch.int32, device=tables.device)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        tables,
        counts,
        tables,
        BLOCK_SIZE=(128, case.block_size),
        seq_lengths=(1, num_blocks * case.block_size),
    )
    # [1, Hkv, all slots of the pool, D]
    keys, values = (
        pool.transpose(0, 1).reshape(1, case.num_kv_heads, -1, case.head_dim)
        for pool in (step.cache.key, step.cache.value)
    )
    query = step.query.view(1, 1, case.num_heads, case.head_dim).transpose(1, 2)
    compiled = torch.compile(flex_attention)

    def attend() -> torch.Tensor:
        found = compiled(
            query, keys, values, block_mask=mask, scale=step.params.scale, enable_gqa=True
        )
        return found.transpose(1, 2).reshape(step.query.shape)

    return attend


ATTENTION: Mapping[str, Callable[[Step, AttentionBackend], Attend]] = MappingProxyType(
    {
        "contiguous, same kernel": contiguous_kernel,
        "fixed cut, same kernel": fixed_cut,
        "dense SDPA": dense_sdpa,
        "gather + SDPA": gather_sdpa,
        "padded SDPA": padded_sdpa,
        "FlexAttention over pages": flex_over_pages,
    }
)


def _over_dense(
    step: Step,
    keys_and_values: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    mask: torch.Tensor | None = None,
) -> Attend:
    """Attend with equally many query rows per sequence; a single row attends to all tokens."""
    case, query = step.case, step.query
    rows = case.sequences[0][0]
    if any(other != rows for other, _ in case.sequences):
        raise ValueError("sequences with equal numbers of rows are what this baseline does")
    num_seqs, group = len(case.sequences), case.num_heads // case.num_kv_heads
    if rows == 1:
        # The group's heads as rows of one head: the fastest form that torch supports.
        grouped = query.view(num_seqs, case.num_kv_heads, group, case.head_dim)

        def decode() -> torch.Tensor:
            keys, values = keys_and_values()
            found = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=step.params.scale
            )
            return found.reshape(query.shape)

        return decode
    from torch.nn.attention.bias import causal_lower_right

    keys, values = (x.repeat_interleave(group, 1) for x in keys_and_values())
    by_head = query.view(num_seqs, rows, case.num_heads, case.head_dim).transpose(1, 2)
    bias = causal_lower_right(rows, keys.shape[2])

    def prefill() -> torch.Tensor:
        found = scaled_dot_product_attention(
            by_head, keys, values, attn_mask=bias, scale=step.params.scale
        )
        return found.transpose(1, 2).reshape(query.shape)

    return prefill
