"""Paged attention in plain torch: slow, easy to read, and the oracle of the other backends."""

import torch

from kernels.checks import check_attend, check_write
from kernels.interface import (
    FP8,
    INT8,
    INT8_LEVELS,
    AttentionParams,
    LayerCache,
    RaggedBatch,
    may_hold,
)


class ReferenceBackend:
    """Any device, any float type, any head size; computes in float32 (float64 for float64)."""

    name = "reference"
    capturable = False

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """All that may hold keys and values of this type."""
        return tuple(
            each for each in (torch.bfloat16, torch.float16, FP8, INT8) if may_hold(each, dtype)
        )

    def write_kv(
        self,
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        cache: LayerCache,
        slot_mapping: torch.Tensor,  # [T] int64
    ) -> None:
        """Store each token's key and value in its slot; a negative slot is padding, skipped.

        Raises:
            ValueError: if shapes or types do not fit each other.
        """
        check_write(key, value, cache, slot_mapping)
        written = slot_mapping >= 0
        block_size = cache.key.shape[2]
        block = slot_mapping[written] // block_size
        offset = slot_mapping[written] % block_size
        _store(cache.key, block, offset, key[written], cache.key_scale, cache.key_scales)
        _store(cache.value, block, offset, value[written], cache.value_scale, cache.value_scales)

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
    ) -> None:
        """Causal attention of each row over its own sequence's pages (PagedAttention, §4.1).

        Only slots that some row may see are read; rows of no sequence are not written.

        Raises:
            ValueError: if shapes or types do not fit each other.
        """
        check_attend(query, cache, batch, out)
        starts = batch.query_starts.tolist()
        for sequence, context_len in enumerate(batch.context_lens.tolist()):
            first, end = starts[sequence], starts[sequence + 1]
            if end > first and context_len > 0:
                table = batch.block_tables[sequence]
                out[first:end] = _attend_sequence(
                    query[first:end], cache, table, context_len, params
                ).to(out.dtype)


def _store(
    pool: torch.Tensor,  # [num_blocks, Hkv, block_size, D]
    block: torch.Tensor,  # [T]
    offset: torch.Tensor,  # [T]
    rows: torch.Tensor,  # [T, Hkv, D]
    scale: float,
    scales: torch.Tensor | None,  # [num_blocks, Hkv, block_size, 1]
) -> None:
    if scales is not None:
        rows, scales[block, :, offset] = quantize(rows)
    elif pool.dtype == FP8:
        limit = torch.finfo(pool.dtype).max
        rows = (rows.float() * (1.0 / scale)).clamp(-limit, limit)
    movable(pool)[block, :, offset] = movable(rows.to(pool.dtype))


def quantize(
    rows: torch.Tensor,  # [..., D]
) -> tuple[torch.Tensor, torch.Tensor]:  # [..., D] int8, [..., 1] float32
    """Round each row to multiples of its scale, a 127th of its largest element.

    The scale of a row with a NaN or an infinity is NaN.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / INT8_LEVELS + (wide * 0.0).sum(-1, keepdim=True)
    steps = torch.where(scales > 0, wide / scales, 0.0).round()
    return steps.to(INT8), scales


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a type that torch can index: it cannot index 8-bit floats everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _attend_sequence(
    query: torch.Tensor,  # [R, H, D]
    cache: LayerCache,
    table: torch.Tensor,  # [max_blocks] int32
    context_len: int,
    params: AttentionParams,
) -> torch.Tensor:  # [R, H, D]
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.key.shape[1]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    window = params.sliding_window if params.sliding_window is not None else context_len
    rows = torch.arange(context_len - num_rows, context_len, device=query.device)  # [R]
    begin = max(0, context_len - num_rows - window + 1)
    keys, values, *scales = (  # [Hkv, N, D]; scales [Hkv, N, 1]
        _gather(each, table, begin, context_len).to(compute) for each in cache.tensors
    )
    key_scale, value_scale = scales or (cache.key_scale, cache.value_scale)
    keys, values = keys * key_scale, values * value_scale
    grouped = query.to(compute).view(num_rows, num_kv_heads, -1, head_dim)  # [R, Hkv, G, D]
    logits = torch.einsum("rhgd,hnd->rhgn", grouped, keys) * params.scale  # [R, Hkv, G, N]
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    columns = torch.arange(begin, context_len, device=query.device)  # [N]
    distance = rows[:, None] - columns[None, :]  # [R, N]
    hidden = (distance < 0) | (distance >= window)
    logits = logits.masked_fill(hidden[:, None, None, :], float("-inf"))
    weights = torch.softmax(logits, dim=-1)
    attended = torch.einsum("rhgn,hnd->rhgd", weights, values)
    return attended.reshape(num_rows, num_heads, head_dim)


def _gather(
    pool: torch.Tensor,  # [num_blocks, Hkv, block_size, D]
    table: torch.Tensor,  # [max_blocks] int32
    begin: int,
    end: int,
) -> torch.Tensor:  # [Hkv, end - begin, D]
    positions = torch.arange(begin, end, device=pool.device)
    block_size = pool.shape[2]
    blocks = table[positions // block_size].long()
    found = movable(pool)[blocks, :, positions % block_size].view(pool.dtype)
    return found.transpose(0, 1)
