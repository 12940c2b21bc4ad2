"""Paged attention on CPUs: compiled kernels that read keys and values in place."""

import ctypes

import torch

from kernels.checks import check_attend, check_write
from kernels.cpu.runtime import kernel_arguments
from kernels.cpu.runtime.entry_points import attend_kernel, write_kernel
from kernels.cpu.runtime.instruction_set import Dot, best_dot
from kernels.cpu.runtime.thread_team import TeamRunner
from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend

# Work below this runs on the calling thread: waking the others would take longer.
_SERIAL_MULTIPLICATIONS = 200_000
_SERIAL_WRITE_BYTES = 64 * 1024
_NO_WINDOW = 1 << 40
# At least, where heads share a task: no thread is to wait long for the last one.
_TASKS_PER_THREAD = 8
_COMPILED_DTYPES = (torch.float32, torch.bfloat16)


class CpuBackend:
    """float32 and bfloat16 with head sizes divisible by 16; anything else,
    and a quantized cache, runs the reference.

    Not thread-safe: scratch memory belongs to the backend, one call at a time.

    Args:
        dot: how bfloat16 is multiplied; by default as this CPU does best.
        deterministic: a row's result depends on its own sequence alone, bit for bit, not on how
            many rows are computed with it. Where bfloat16 is multiplied by pairs that is so anyway;
            else it is slower where there are few rows.
    """

    name = "cpu"
    capturable = False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, dot: Dot | None = None, deterministic: bool = False) -> None:
        self._dot = best_dot() if dot is None else dot
        self._deterministic = deterministic
        self._team = TeamRunner()
        self._reference = ReferenceBackend()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def warm_up(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Compile, or load from numba's cache, what a model of this shape will call.

        Seconds without a cache (NUMBA_CACHE_DIR, or else ``__pycache__`` beside the sources).
        """
        cache = LayerCache(*torch.zeros(2, 1, num_kv_heads, 16, head_dim, dtype=dtype))
        new = torch.zeros(16, num_kv_heads, head_dim, dtype=dtype)
        self.write_kv(new, new, cache, torch.arange(16))
        batch = RaggedBatch(
            slot_mapping=torch.arange(16),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=torch.tensor([16], dtype=torch.int32),
            query_starts=torch.tensor([0, 16], dtype=torch.int32),
            max_query_len=16,
            max_context_len=16,
        )
        query = torch.zeros(16, num_heads, head_dim, dtype=dtype)
        self.attend(query, cache, batch, AttentionParams(scale=1.0), torch.empty_like(query))

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
        if cache.quantized:
            self._reference.write_kv(key, value, cache, slot_mapping)
            return
        check_write(key, value, cache, slot_mapping)
        size = key.element_size()
        num_tokens, num_kv_heads, head_dim = key.shape
        job = (ctypes.c_int64 * kernel_arguments.WRITE_FIELDS)()
        job[2:5] = [key.data_ptr(), key.stride(0) * size, key.stride(1) * size]
        job[5:8] = [value.data_ptr(), value.stride(0) * size, value.stride(1) * size]
        _describe_cache(job, cache)
        job[kernel_arguments.SLOTS] = slot_mapping.data_ptr()
        job[kernel_arguments.NUM_TOKENS] = num_tokens
        job[kernel_arguments.ROW_BYTES] = head_dim * size
        num_bytes = 2 * num_tokens * num_kv_heads * head_dim * size
        threads = 1 if num_bytes < _SERIAL_WRITE_BYTES else self._team.num_threads()
        self._team.run(write_kernel(), ctypes.addressof(job), threads)

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
        if query.dtype not in _COMPILED_DTYPES or head_dim % 16 or cache.quantized:
            self._reference.attend(query, cache, batch, params, out)
            return
        check_attend(query, cache, batch, out)
        num_kv_heads = cache.key.shape[1]
        group = num_heads // num_kv_heads
        size = query.element_size()
        multiplications = num_tokens * num_heads * head_dim * batch.max_context_len
        threads = 1 if multiplications < _SERIAL_MULTIPLICATIONS else self._team.num_threads()
        scratch_bytes = -(-kernel_arguments.scratch_bytes(group, head_dim) // 4096) * 4096
        job = (ctypes.c_int64 * kernel_arguments.ATTEND_FIELDS)()
        job[2:5] = [query.data_ptr(), query.stride(0) * size, query.stride(1) * size]
        job[5:8] = [out.data_ptr(), out.stride(0) * size, out.stride(1) * size]
        _describe_cache(job, cache)
        job[kernel_arguments.TABLES] = batch.block_tables.data_ptr()
        job[kernel_arguments.TABLE_ROW] = batch.block_tables.stride(0) * 4
        job[kernel_arguments.CONTEXT_LENS] = batch.context_lens.data_ptr()
        job[kernel_arguments.QUERY_STARTS] = batch.query_starts.data_ptr()
        job[kernel_arguments.NUM_SEQS] = batch.context_lens.shape[0]
        job[kernel_arguments.GROUP] = group
        job[kernel_arguments.HEAD_DIM] = head_dim
        job[kernel_arguments.TILE_TOKENS] = max(1, kernel_arguments.MAX_TILE_ROWS // group)
        job[kernel_arguments.WINDOW] = params.sliding_window or _NO_WINDOW
        job[kernel_arguments.SCALE] = kernel_arguments.float_bits(params.scale)
        job[kernel_arguments.SOFTCAP] = kernel_arguments.float_bits(params.softcap or 0.0)
        job[kernel_arguments.SCRATCH] = self._scratch_for(threads * scratch_bytes)
        job[kernel_arguments.SCRATCH_BYTES] = scratch_bytes
        job[kernel_arguments.FEWEST_TASKS] = _TASKS_PER_THREAD * threads
        job[kernel_arguments.COLUMN_ROWS] = self._column_rows(query.dtype)
        self._team.run(attend_kernel(query.dtype, self._dot), ctypes.addressof(job), threads)

    def _column_rows(self, dtype: torch.dtype) -> int:
        """From how many rows on a tile has them in lanes.

        By elements the two shapes sum in different orders: one of them then has to serve all.
        """
        by_pairs = dtype == torch.bfloat16 and self._dot is not Dot.WIDENED
        one_shape = self._deterministic and not by_pairs
        return 1 if one_shape else kernel_arguments.FASTER_COLUMN_ROWS

    def _scratch_for(self, num_bytes: int) -> int:
        """Address of that much memory, aligned to a cache line, reused from call to call."""
        if self._scratch.numel() < num_bytes + 64:
            self._scratch = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def _describe_cache(job: "ctypes.Array[ctypes.c_int64]", cache: LayerCache) -> None:
    size = cache.key.element_size()
    block, head, slot, _ = cache.key.stride()
    job[8:12] = [cache.key.data_ptr(), block * size, head * size, slot * size]
    block, head, slot, _ = cache.value.stride()
    job[12:16] = [cache.value.data_ptr(), block * size, head * size, slot * size]
    job[kernel_arguments.NUM_KV_HEADS] = cache.key.shape[1]
    job[kernel_arguments.BLOCK_SIZE] = cache.key.shape[2]
