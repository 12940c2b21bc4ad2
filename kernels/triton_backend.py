"""Paged attention on GPUs: chooses tiles and launches the Triton kernels."""

from dataclasses import dataclass

import torch
import triton

from kernels.checks import check_attend, check_copy, check_write
from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.triton_attention import paged_attention_kernel
from kernels.triton_copy import copy_blocks_kernel
from kernels.triton_write import write_kv_kernel

_WRITE_TILE_TOKENS = 16
_COPY_TILE_SLOTS = 16


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of a tile and how many threads and pipeline stages work on it."""

    rows: int  # query tokens x heads of a group, packed
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(head_dim: int, group: int, dtype: torch.dtype, decode: bool) -> TileConfig:
    """Tile for a head size; chosen by registers and spills of compiled code, not yet by timing."""
    padded_dim = triton.next_power_of_2(head_dim)
    packed = max(16, triton.next_power_of_2(group))
    wide = dtype == torch.float32
    if decode:
        keys = 64 if padded_dim <= 64 else 32
        return TileConfig(packed, keys // 2 if wide else keys, 4, 2 if wide else 3)
    if wide:  # multiplied without tensor cores, to keep float32's precision
        return TileConfig(max(packed, 32), 32 if padded_dim <= 64 else 16, 8, 2)
    if padded_dim <= 128:
        return TileConfig(max(packed, 128), 64, 8, 3)
    return TileConfig(max(packed, 64), 32, 8, 2)


def compile_options(tile: TileConfig) -> dict[str, object]:
    """What the compiler is told beyond the kernel's constants.

    Fusing multiplications with additions is asked for because Triton's default is changing.
    """
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


class TritonBackend:
    """float16, bfloat16 and float32; block sizes are powers of two, head sizes up to 256.

    Nothing is read back from the device, so calls can be captured in CUDA graphs: the grid covers
    ``max_query_len`` rows of each sequence, and lengths are read by the kernels.
    """

    name = "triton"
    dtypes = (torch.float16, torch.bfloat16, torch.float32)

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
        num_tokens, num_kv_heads, head_dim = key.shape
        if num_tokens == 0:
            return
        grid = (triton.cdiv(num_tokens, _WRITE_TILE_TOKENS), num_kv_heads)
        write_kv_kernel[grid](
            key,
            value,
            cache.key,
            cache.value,
            slot_mapping,
            num_tokens,
            *key.stride()[:2],
            *value.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=cache.key.shape[2],
            TILE_TOKENS=_WRITE_TILE_TOKENS,
            num_warps=4,
        )

    def copy_blocks(
        self,
        cache: LayerCache,
        sources: torch.Tensor,  # [P] int64, may repeat
        targets: torch.Tensor,  # [P] int64, all different, none of them a source
    ) -> None:
        """Copy whole blocks, keys and values (copy-on-write: PagedAttention, §4.4).

        Raises:
            ValueError: if the lists do not fit each other.
        """
        check_copy(cache, sources, targets)
        if len(sources) == 0:
            return
        _, num_kv_heads, block_size, head_dim = cache.key.shape
        tile_slots = min(_COPY_TILE_SLOTS, triton.next_power_of_2(block_size))
        grid = (len(sources), num_kv_heads, triton.cdiv(block_size, tile_slots))
        copy_blocks_kernel[grid](
            cache.key,
            cache.value,
            sources,
            targets,
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            TILE_SLOTS=tile_slots,
            num_warps=4,
        )

    def attend(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
    ) -> None:
        """Causal attention of each row over its own sequence's pages (PagedAttention, §4.1).

        Only slots that some row may see are read; rows of no sequence are not written. Sequences
        of one row and sequences of several are served by two launches with tiles of their own.

        Raises:
            ValueError: if shapes or types do not fit each other, or the block size is not a
                power of two, or the head size exceeds 256.
        """
        check_attend(query, cache, batch, out)
        block_size, head_dim = cache.key.shape[2:]
        if block_size & (block_size - 1) or head_dim > 256:
            raise ValueError(f"block size {block_size}, head size {head_dim}: not supported")
        if batch.context_lens.shape[0] == 0 or batch.max_query_len == 0:
            return
        self._launch(query, cache, batch, params, out, decode=True)
        if batch.max_query_len > 1:
            self._launch(query, cache, batch, params, out, decode=False)

    def _launch(
        self,
        query: torch.Tensor,  # [T, H, D]
        cache: LayerCache,
        batch: RaggedBatch,
        params: AttentionParams,
        out: torch.Tensor,  # [T, H, D]
        decode: bool,
    ) -> None:
        _, num_heads, head_dim = query.shape
        _, num_kv_heads, block_size, _ = cache.key.shape
        group = num_heads // num_kv_heads
        tile = choose_tile(head_dim, group, query.dtype, decode)
        tiles = 1 if decode else triton.cdiv(batch.max_query_len, tile.rows // group)
        grid = (tiles, num_kv_heads, batch.context_lens.shape[0])
        paged_attention_kernel[grid](
            query,
            out,
            cache.key,
            cache.value,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            params.scale,
            params.softcap or 1.0,
            params.sliding_window or 0,
            *query.stride()[:2],
            *out.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            batch.block_tables.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_SIZE=block_size,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            DECODE=decode,
            HAS_WINDOW=params.sliding_window is not None,
            HAS_SOFTCAP=params.softcap is not None,
            UPCAST=interpreting() and query.dtype == torch.bfloat16,
            **compile_options(tile),
        )
