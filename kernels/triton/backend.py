"""Paged attention on GPUs: checks a call and launches the kernels."""

import torch
import triton

from kernels.checks import check_attend, check_rotary, check_write
from kernels.interface import FP8, INT8, AttentionParams, LayerCache, RaggedBatch
from kernels.triton.attention_launch import AttendLaunch
from kernels.triton.cache_write_kernel import write_kv_kernel
from kernels.triton.layers import ROTARY_TILE, ROTARY_WARPS
from kernels.triton.rotary_kernel import rotate_write_kernel

_WRITE_TILE_TOKENS = 16
# A larger block, or one of another size than a power of two, is no page: it has to hold a sequence
# whole, and no table is followed.
_LARGEST_PAGE_TOKENS = 1024


class TritonBackend:
    """float16, bfloat16 and float32; head sizes up to 256; caches of narrower types as well.

    Blocks of a power of two of up to 1,024 tokens are pages. A cache with others is read as
    contiguous memory: block ``block_tables[s, 0]`` holds all of sequence s.

    Nothing is read back from the device, so calls can be captured in CUDA graphs: grids follow
    from the shapes of the tensors and the bounds in the batch, and the kernels read the lengths
    and cut the work themselves.

    Args:
        num_processors: streaming multiprocessors to fill; by default those of the query's device.
        fixed_cut: cut each context by its own length alone, so that a row's result does not
            depend, bit for bit, on the batch. Small batches fill the device less well.
    """

    name = "triton"
    capturable = True
    dtypes = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(self, num_processors: int | None = None, fixed_cut: bool = False) -> None:
        self._wanted_processors = num_processors
        self._fixed_cut = fixed_cut

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types of caches, narrower than the queries' own, that it has kernels for."""
        halves = (torch.bfloat16, torch.float16) if dtype == torch.float32 else ()
        return (*halves, FP8, INT8)

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
        scales = cache.tensors[2:] or cache.tensors  # the kernel writes none without HAS_SCALES
        write_kv_kernel[grid](
            key,
            value,
            cache.key,
            cache.value,
            *scales,
            slot_mapping,
            num_tokens,
            1.0 / cache.key_scale,
            1.0 / cache.value_scale,
            *key.stride()[:2],
            *value.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *scales[0].stride()[:3],
            *scales[1].stride()[:3],
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=cache.key.shape[2],
            TILE_TOKENS=_WRITE_TILE_TOKENS,
            QUANTIZE=cache.dtype == FP8,
            HAS_SCALES=cache.key_scales is not None,
            num_warps=4,
        )

    def rotate_and_write_kv(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, Hkv, D]
        value: torch.Tensor,  # [T, Hkv, D]
        cos: torch.Tensor,  # [T, D]
        sin: torch.Tensor,  # [T, D]
        cache: LayerCache,
        slot_mapping: torch.Tensor,  # [T] int64
    ) -> torch.Tensor:
        """Rotated queries [T, H, D]; rotated keys are stored, with their values, in one launch.

        Raises:
            ValueError: if shapes or types do not fit each other.
        """
        check_write(key, value, cache, slot_mapping)
        check_rotary(query, key, cos, sin)
        num_tokens, num_heads, head_dim = query.shape
        if cos.shape[1] != head_dim:
            raise ValueError(f"cos {tuple(cos.shape)}: all of D {head_dim} must be rotated")
        num_kv_heads = key.shape[1]
        rotated = query.new_empty(query.shape)
        if num_tokens == 0:
            return rotated
        tiles = triton.cdiv(num_heads, ROTARY_TILE) + triton.cdiv(num_kv_heads, ROTARY_TILE)
        scales = cache.tensors[2:] or cache.tensors  # the kernel writes none without HAS_SCALES
        rotate_write_kernel[(num_tokens, tiles)](
            query,
            key,
            value,
            rotated,
            cos,
            sin,
            cache.key,
            cache.value,
            *scales,
            slot_mapping,
            1.0 / cache.key_scale,
            1.0 / cache.value_scale,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *scales[0].stride()[:3],
            *scales[1].stride()[:3],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=cache.key.shape[2],
            TILE_HEADS=ROTARY_TILE,
            QUANTIZE=cache.dtype == FP8,
            HAS_SCALES=cache.key_scales is not None,
            num_warps=ROTARY_WARPS,
        )
        return rotated

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
        of few rows and sequences of many are served by two launches with tiles of their own; where
        contexts may be long, each is followed by one that merges what was cut into pieces.

        Raises:
            ValueError: if shapes or types do not fit each other, or blocks are neither pages nor
                enough for whole sequences, or the head size exceeds 256.
        """
        check_attend(query, cache, batch, out)
        block_size, head_dim = cache.key.shape[2:]
        if head_dim > 256:
            raise ValueError(f"head size {head_dim}: not supported")
        paged = block_size <= _LARGEST_PAGE_TOKENS and not block_size & (block_size - 1)
        if not paged and block_size < batch.max_context_len:
            raise ValueError(
                f"blocks of {block_size} tokens are no pages, and hold whole sequences, not "
                f"{batch.max_context_len} tokens"
            )
        if params.scale <= 0:
            raise ValueError(f"scale {params.scale} must be positive")
        if batch.context_lens.shape[0] == 0 or batch.max_query_len == 0 or query.shape[0] == 0:
            return
        num_processors = self._num_processors(query.device)
        launch = AttendLaunch(
            query, cache, batch, params, out, paged, num_processors, self._fixed_cut
        )
        launch.run(short=True)
        if batch.max_query_len > launch.short_tokens:
            launch.run(short=False)

    def _num_processors(self, device: torch.device) -> int:
        if self._wanted_processors is not None:
            return self._wanted_processors
        if device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(device).multi_processor_count
