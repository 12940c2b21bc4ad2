"""The CPU kernel of paged attention: threads claim tiles of query rows until none is left.

A tile is some query tokens of one sequence under one KV head, so that keys and values are read once
for the whole group of query heads; a decode tile may be under several KV heads.
"""

# ruff: noqa: ARG001 - numba calls an overload with types to choose what to compile

from functools import cache

import torch
from numba import njit
from numba.extending import overload

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.attention.decode_tile import attend_decode_tile
from kernels.cpu.attention.prefill_tile import attend_prefill_tile
from kernels.cpu.runtime.bf16_dot import BF16_DOT_TAGS, is_amx_tag
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.instruction_set import Dot
from kernels.cpu.runtime.memory import claim_task, claim_thread, field, load_i32


@njit
def attend_tasks(args, tag, kv):
    """Attend for all tiles.

    ``tag`` is the type of the queries' elements (see simd), or the bf16 dot product's (see
    bf16_dot); ``kv`` that of keys and values.
    """
    num_seqs = field(args, fields.NUM_SEQS)
    num_kv_heads = field(args, fields.NUM_KV_HEADS)
    group = field(args, fields.GROUP)
    tile_tokens = field(args, fields.TILE_TOKENS)
    lens = field(args, fields.CONTEXT_LENS)  # [S] int32
    starts = field(args, fields.QUERY_STARTS)  # [S + 1] int32
    prefill_tile_rows = field(args, fields.PREFILL_TILE_ROWS)
    thread = claim_thread(args)
    scratch = field(args, fields.SCRATCH) + thread * field(args, fields.SCRATCH_BYTES)
    # KV heads of a decode tile, as long as there are enough tasks.
    most_heads = min(num_kv_heads, num_seqs * num_kv_heads // field(args, fields.FEWEST_TASKS))
    # Tasks are numbered sequence by sequence, and the numbers that a thread claims only grow.
    sequence = -1
    tasks_before, tasks_here = 0, 0
    heads, parts = 1, 1
    while True:
        task = claim_task(args)
        while task >= tasks_before + tasks_here:
            tasks_before += tasks_here
            sequence += 1
            if sequence >= num_seqs:
                return
            rows = load_i32(starts + 4 * sequence + 4) - load_i32(starts + 4 * sequence)
            heads = 1
            if rows * group < prefill_tile_rows:
                heads = max(1, min(most_heads, fields.MAX_TILE_ROWS // max(1, rows * group)))
            parts = (num_kv_heads + heads - 1) // heads
            tasks_here = (rows + tile_tokens - 1) // tile_tokens * parts
            if load_i32(lens + 4 * sequence) <= 0:
                tasks_here = 0
        tile, part = divmod(task - tasks_before, parts)
        head = part * heads
        first = tile * tile_tokens
        start = load_i32(starts + 4 * sequence)
        num_rows = load_i32(starts + 4 * sequence + 4) - start
        num_tokens = min(tile_tokens, num_rows - first)
        position = load_i32(lens + 4 * sequence) - num_rows + first
        if num_tokens * group < prefill_tile_rows:
            num_heads = min(heads, num_kv_heads - head)
            attend_decode_tile(
                args, tag, kv, scratch, sequence, head, num_heads, start + first, num_tokens,
                position,
            )  # fmt: skip
        else:
            attend_many_rows(
                args, tag, kv, scratch, sequence, head, start + first, num_tokens, position
            )


def attend_many_rows(args, tag, kv, scratch, sequence, head, first_token, num_tokens, position):
    """Attend for the rows of one tile under one KV head. numba puts one of two in its place."""
    raise NotImplementedError


@overload(attend_many_rows)
def _choose_many_rows(args, tag, kv, scratch, sequence, head, first_token, num_tokens, position):
    if not is_amx_tag(tag):
        return attend_prefill_tile.py_func

    def as_few(args, tag, kv, scratch, sequence, head, first_token, num_tokens, position):
        attend_decode_tile(
            args, tag, kv, scratch, sequence, head, 1, first_token, num_tokens, position
        )

    return as_few


@cache
def attend_kernel(dtype: torch.dtype, dot: Dot, kv_dtype: torch.dtype) -> Kernel:
    """Paged attention of queries of a type over keys and values of a type.

    ``dot`` is how bfloat16 is multiplied.

    Raises:
        ValueError: no kernel serves the types.
    """
    tag = element_tag(dtype)
    if dtype == torch.bfloat16:
        tag = BF16_DOT_TAGS.get(dot, tag)
    return compile_kernel(attend_tasks, fields.ATTENTION_LAYOUT, tag, element_tag(kv_dtype))
