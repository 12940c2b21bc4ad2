"""Attention by torch's own operator, for sequences in contiguous memory."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.checks import check_attend
from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend


class SdpaBackend(ReferenceBackend):
    """Any device and float type; each sequence must be one block of the cache.

    Keys and values are read in place, through views. Writes, and layers that the operator does not
    serve (soft-cap, pools of other types than the queries'), are left to the reference.
    """

    name = "sdpa"

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:  # noqa: ARG002
        """None: the operator reads keys and values in the queries' own type."""
        return ()

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
    ) -> None:
        """Causal attention of each row over its own sequence, one sequence after the other.

        Raises:
            ValueError: if shapes or types do not fit each other, or a sequence has several blocks.
        """
        check_attend(query, cache, batch, out)
        if batch.block_tables.shape[1] != 1:
            raise ValueError(f"block tables {tuple(batch.block_tables.shape)}: one column expected")
        if params.softcap is not None or cache.dtype != query.dtype:
            super().attend(query, cache, batch, params, out)
            return
        starts = batch.query_starts.tolist()
        pieces = batch.block_tables[:, 0].tolist()
        for sequence, context_len in enumerate(batch.context_lens.tolist()):
            first, end = starts[sequence], starts[sequence + 1]
            if end > first and context_len > 0:
                piece = pieces[sequence]
                key, value = cache.key[piece], cache.value[piece]  # [Hkv, block_size, D]
                out[first:end] = _attend_sequence(query[first:end], key, value, context_len, params)


def _attend_sequence(
    query: torch.Tensor,  # [R, H, D]
    key: torch.Tensor,  # [Hkv, N or more, D]
    value: torch.Tensor,  # [Hkv, N or more, D]
    context_len: int,  # N
    params: AttentionParams,
) -> torch.Tensor:  # [R, H, D]
    num_rows, num_heads, _ = query.shape
    window = params.sliding_window if params.sliding_window is not None else context_len
    begin = max(0, context_len - num_rows - window + 1)
    mask = None
    if num_rows > 1:
        rows = torch.arange(context_len - num_rows, context_len, device=query.device)
        columns = torch.arange(begin, context_len, device=query.device)
        distance = rows[:, None] - columns[None, :]  # [R, N]
        mask = (distance >= 0) & (distance < window)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None, :, begin:context_len],
        value[None, :, begin:context_len],
        attn_mask=mask,
        scale=params.scale,
        enable_gqa=num_heads != key.shape[0],
    )
    return attended[0].transpose(0, 1)
