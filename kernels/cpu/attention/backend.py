"""The attention backend of CPUs: checks a call, writes its arguments and runs the kernel."""

import ctypes

import torch

from kernels.checks import check_attend, check_write
from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.attention_kernel import attend_kernel
from kernels.cpu.attention.cache_write_kernel import write_kernel
from kernels.cpu.runtime.instruction_set import Dot, best_dot
from kernels.cpu.runtime.kernel_arguments import float_bits
from kernels.cpu.runtime.thread_team import ThreadTeam
from kernels.interface import INT8, AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend

# Work below this runs on the calling thread: waking the others would take longer.
_SERIAL_MULTIPLICATIONS = 200_000
_SERIAL_WRITE_BYTES = 64 * 1024
_NO_WINDOW = 1 << 40
# At least, where heads share a task, so that no thread waits long for the last task.
_TASKS_PER_THREAD = 8
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
# Of keys and values, beside the queries' own.
_NARROW_DTYPES = {torch.float32: (torch.bfloat16, INT8), torch.bfloat16: (INT8,)}


class CpuBackend:
    """Attention in numba for float32 and bfloat16 and head sizes divisible by 16.

    The cache is of the same type, of int8, or of bfloat16 for float32. Anything else is left to the
    reference. Not thread-safe: scratch memory
    belongs to the backend, one call at a time.

    Args:
        dot: how bfloat16 is multiplied; by default as this CPU does best.
        deterministic: a row's result depends on its own sequence alone, bit for bit, not on how
            many rows are computed with it. With dot products of bf16 pairs that holds anyway;
            without them decode is slower then.
    """

    name = "cpu"
    capturable = False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, dot: Dot | None = None, deterministic: bool = False) -> None:
        self._dot = best_dot() if dot is None else dot
        self._deterministic = deterministic
        self._team = ThreadTeam()
        self._reference = ReferenceBackend()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def narrow_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Types of caches, narrower than the queries' own, that it has kernels for."""
        return _NARROW_DTYPES.get(dtype, ())

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
        if not _is_served(key, cache):
            self._reference.write_kv(key, value, cache, slot_mapping)
            return
        check_write(key, value, cache, slot_mapping)
        size = key.element_size()
        num_tokens, num_kv_heads, head_dim = key.shape
        args = (ctypes.c_int64 * fields.CACHE_WRITE_LAYOUT.num_fields)()
        args[2:5] = [key.data_ptr(), key.stride(0) * size, key.stride(1) * size]
        args[5:8] = [value.data_ptr(), value.stride(0) * size, value.stride(1) * size]
        _describe_cache(args, cache)
        args[fields.SLOTS] = slot_mapping.data_ptr()
        args[fields.NUM_TOKENS] = num_tokens
        args[fields.ROW_BYTES] = head_dim * size
        args[fields.HEAD_DIM] = head_dim
        num_bytes = 2 * num_tokens * num_kv_heads * head_dim * size
        threads = 1 if num_bytes < _SERIAL_WRITE_BYTES else self._team.num_threads()
        self._team.run(write_kernel(key.dtype, cache.dtype), ctypes.addressof(args), threads)

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
        num_tokens, num_heads, head_dim = query.shape
        if query.dtype not in _KERNEL_DTYPES or head_dim % 16 or not _is_served(query, cache):
            self._reference.attend(query, cache, batch, params, out)
            return
        check_attend(query, cache, batch, out)
        num_kv_heads = cache.key.shape[1]
        group = num_heads // num_kv_heads
        size = query.element_size()
        widened = cache.dtype != query.dtype
        multiplications = num_tokens * num_heads * head_dim * batch.max_context_len
        threads = 1 if multiplications < _SERIAL_MULTIPLICATIONS else self._team.num_threads()
        scratch_bytes = -(-fields.scratch_bytes(group, head_dim, widened) // 4096) * 4096
        args = (ctypes.c_int64 * fields.ATTENTION_LAYOUT.num_fields)()
        args[2:5] = [query.data_ptr(), query.stride(0) * size, query.stride(1) * size]
        args[5:8] = [out.data_ptr(), out.stride(0) * size, out.stride(1) * size]
        _describe_cache(args, cache)
        args[fields.TABLES] = batch.block_tables.data_ptr()
        args[fields.TABLE_ROW] = batch.block_tables.stride(0) * 4
        args[fields.CONTEXT_LENS] = batch.context_lens.data_ptr()
        args[fields.QUERY_STARTS] = batch.query_starts.data_ptr()
        args[fields.NUM_SEQS] = batch.context_lens.shape[0]
        args[fields.GROUP] = group
        args[fields.HEAD_DIM] = head_dim
        args[fields.TILE_TOKENS] = max(1, fields.MAX_TILE_ROWS // group)
        args[fields.WINDOW] = params.sliding_window or _NO_WINDOW
        args[fields.SCALE] = float_bits(params.scale)
        args[fields.SOFTCAP] = float_bits(params.softcap or 0.0)
        args[fields.SCRATCH] = self._scratch_for(threads * scratch_bytes)
        args[fields.SCRATCH_BYTES] = scratch_bytes
        args[fields.FEWEST_TASKS] = _TASKS_PER_THREAD * threads
        args[fields.PREFILL_TILE_ROWS] = self._prefill_tile_rows(query.dtype)
        kernel = attend_kernel(query.dtype, self._dot, cache.dtype)
        self._team.run(kernel, ctypes.addressof(args), threads)

    def _prefill_tile_rows(self, dtype: torch.dtype) -> int:
        """The fewest rows of a prefill tile; tiles of fewer rows are decode tiles.

        Without dot products of bf16 pairs the two kinds of tile sum in different orders:
        deterministic attention then uses prefill tiles alone.
        """
        by_pairs = dtype == torch.bfloat16 and self._dot.of_pairs
        prefill_only = self._deterministic and not by_pairs
        return 1 if prefill_only else fields.FASTER_PREFILL_TILE_ROWS

    def _scratch_for(self, num_bytes: int) -> int:
        """Address of so much memory on a cache line, reused from call to call."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def _is_served(
    rows: torch.Tensor,  # [T, H, D], queries, keys or values
    cache: LayerCache,
) -> bool:
    """Whether there are kernels for a cache of this type beside rows of this type."""
    if cache.dtype == rows.dtype:
        return True
    return cache.dtype in _NARROW_DTYPES.get(rows.dtype, ()) and rows.shape[2] % 16 == 0


def _describe_cache(args: "ctypes.Array[ctypes.c_int64]", cache: LayerCache) -> None:
    places = (fields.KEY, fields.VALUE, fields.KEY_SCALE, fields.VALUE_SCALE)
    for place, tensor in zip(places, cache.tensors, strict=False):
        size = tensor.element_size()
        block, head, slot, _ = tensor.stride()
        args[place : place + 4] = [tensor.data_ptr(), block * size, head * size, slot * size]
    args[fields.NUM_KV_HEADS] = cache.key.shape[1]
    args[fields.BLOCK_SIZE] = cache.key.shape[2]
