"""Measures at start the speeds on which scheduling depends: prefill, decode and swapping."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from gpu_worker.kv.memory import KVMemory
from gpu_worker.startup.warm_up_plans import decode_plan, prefill_plan
from gpu_worker.step.executor import Executor
from shared.codec import IntArray
from shared.messages.leases import Speeds

# Tokens of a typical preempted sequence; recompute and swap are both measured with it.
_NUM_TOKENS = 256
_PREFILLS = 4
_PREFILL_BUDGET_S = 0.1
# Sequences that decode at once; the scheduler compares batches that are about as large. Where the
# weights are read from memory a few more cost little, and many cost as much as they compute.
_DECODING = (8, 32)
_DECODES = 3  # steps of each
_DECODE_PROMPT_TOKENS = 2
_SWAPS = 9
_SWAP_BUDGET_S = 0.05
# Without a host pool nothing is swapped, but the scheduler divides by this speed.
_NO_SWAPPING = 1.0


def measure_speeds(
    executor: Executor, memory: KVMemory, agreed: Callable[[bool], bool] = bool
) -> Speeds:
    """Compute a prompt, decode, and swap blocks out and in, a few times each.

    The executor must have no sequences, and has none afterwards; blocks are overwritten.

    Args:
        executor: computes.
        memory: its pools.
        agreed: whether all ranks that compute together want to go on measuring.
    """
    kv = memory.geometry
    longest = executor.limits.max_model_len - 1
    num_tokens = min(_NUM_TOKENS, kv.num_blocks * kv.block_size, longest)
    num_blocks = -(-num_tokens // kv.block_size)
    on_gpu = any(cache.key.is_cuda for cache in memory.layers.values())
    prefill_s = _prefill_s(executor, num_tokens, num_blocks, on_gpu, agreed)
    num_swapped = min(num_blocks, kv.num_host_blocks)
    overhead_s, token_s = _decode_s(executor)
    return Speeds(
        num_tokens / prefill_s,
        _swap_bytes_per_s(memory, num_swapped, on_gpu),
        overhead_s,
        token_s,
    )


def _prefill_s(
    executor: Executor,
    num_tokens: int,
    num_blocks: int,
    on_gpu: bool,
    agreed: Callable[[bool], bool],
) -> float:
    """Seconds of the fastest of some forward passes over a chunk."""
    tokens = np.arange(num_tokens, dtype=np.int32) % executor.limits.vocab_size
    plan = prefill_plan([tokens], num_blocks)
    # On a GPU the first pass compiles kernels. On a CPU they are compiled already, and one pass of
    # a large model takes long enough.
    least = 2 if on_gpu else 1
    began = time.perf_counter()
    found: list[float] = []
    while len(found) < least or (
        len(found) < _PREFILLS and agreed(time.perf_counter() - began < _PREFILL_BUDGET_S)
    ):
        found.append(executor.execute(plan).model_us / 1e6)
        executor.reset()
    return max(min(found), 1e-6)


def _decode_s(executor: Executor) -> tuple[float, float]:
    """Seconds of a step without sequences, and of each sequence in it; zeros: no room to measure.

    Of the lines from a step with one sequence to steps with more, the steepest.
    """
    limits = executor.limits
    num_tokens = _DECODE_PROMPT_TOKENS + _DECODES
    num_blocks = -(-num_tokens // limits.kv.block_size)
    counts = [count for count in _DECODING if count * num_blocks <= limits.kv.num_blocks]
    if not counts or num_tokens >= limits.max_model_len:
        return 0.0, 0.0
    one_s = _decode_step_s(executor, 1, num_blocks)
    slopes = [
        (_decode_step_s(executor, count, num_blocks) - one_s) / (count - 1) for count in counts
    ]
    token_s = max(*slopes, 1e-9)
    return max(one_s - token_s, 0.0), token_s


def _decode_step_s(executor: Executor, num_sequences: int, num_blocks: int) -> float:
    """Seconds of the fastest of some steps in which so many sequences decode."""
    tokens = np.arange(_DECODE_PROMPT_TOKENS, dtype=np.int32) % executor.limits.vocab_size
    executor.execute(prefill_plan([tokens] * num_sequences, num_blocks, _DECODES + 1))
    plans = [decode_plan(2 + step) for step in range(_DECODES)]
    found = [executor.execute(plan).model_us / 1e6 for plan in plans]
    executor.reset()
    return max(min(found), 1e-6)


def _swap_bytes_per_s(memory: KVMemory, num_blocks: int, on_gpu: bool) -> float:
    """Bytes per second of swapping blocks out and in; their contents stay."""
    if num_blocks == 0:
        return _NO_SWAPPING
    blocks = np.arange(num_blocks, dtype=np.int32)
    _swap_s(memory, blocks, on_gpu)  # touches the host's pages for the first time
    began = time.perf_counter()
    found: list[float] = []
    while not found or (len(found) < _SWAPS and time.perf_counter() - began < _SWAP_BUDGET_S):
        found.append(_swap_s(memory, blocks, on_gpu))
    return 2 * num_blocks * memory.geometry.bytes_per_block / max(median(found), 1e-9)


def _swap_s(memory: KVMemory, blocks: IntArray, on_gpu: bool) -> float:
    """Seconds of swapping blocks [n] out and in."""
    began = time.perf_counter()
    memory.swap_out(blocks, blocks)
    memory.swap_in(blocks, blocks)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began
