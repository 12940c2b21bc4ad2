"""The CPU kernel that writes new keys and values to their slots of the KV cache."""

from functools import cache

from numba import njit

from kernels.cpu.attention import attention_arguments as fields
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.memory import claim_task, copy_bytes, field, load_i64


@njit
def write_tasks(args):
    """Copy keys and values of WRITE_TOKENS tokens per task, as bytes."""
    num_tokens = field(args, fields.NUM_TOKENS)
    num_kv_heads = field(args, fields.NUM_KV_HEADS)
    block_size = field(args, fields.BLOCK_SIZE)
    row_bytes = field(args, fields.ROW_BYTES)
    slots = field(args, fields.SLOTS)  # [T] int64
    while True:
        begin = claim_task(args) * fields.WRITE_TOKENS
        if begin >= num_tokens:
            return
        for token in range(begin, min(begin + fields.WRITE_TOKENS, num_tokens)):
            slot = load_i64(slots + 8 * token)
            if slot < 0:  # padding
                continue
            block, offset = slot // block_size, slot % block_size
            key = field(args, fields.KEY) + block * field(args, fields.KEY_BLOCK)
            key += offset * field(args, fields.KEY_SLOT)
            value = field(args, fields.VALUE) + block * field(args, fields.VALUE_BLOCK)
            value += offset * field(args, fields.VALUE_SLOT)
            new_key = field(args, fields.NEW_KEY) + token * field(args, fields.NEW_KEY_TOKEN)
            new_value = field(args, fields.NEW_VALUE)
            new_value += token * field(args, fields.NEW_VALUE_TOKEN)
            for head in range(num_kv_heads):
                copy_bytes(
                    key + head * field(args, fields.KEY_HEAD),
                    new_key + head * field(args, fields.NEW_KEY_HEAD),
                    row_bytes,
                )
                copy_bytes(
                    value + head * field(args, fields.VALUE_HEAD),
                    new_value + head * field(args, fields.NEW_VALUE_HEAD),
                    row_bytes,
                )


@cache
def write_kernel() -> Kernel:
    """The cache write, for elements of any type."""
    return compile_kernel(write_tasks, fields.CACHE_WRITE_LAYOUT)
