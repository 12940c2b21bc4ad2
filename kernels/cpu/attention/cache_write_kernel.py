"""The CPU kernel that stores new keys and values in their slots."""

from numba import njit

from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import claim, copy_bytes, field, load_i64


@njit
def write_tasks(job):
    """Store keys and values of tokens [t, t + WRITE_TOKENS) per task; elements are just bytes."""
    num_tokens = field(job, fields.NUM_TOKENS)
    num_kv_heads = field(job, fields.NUM_KV_HEADS)
    block_size = field(job, fields.BLOCK_SIZE)
    row_bytes = field(job, fields.ROW_BYTES)
    slots = field(job, fields.SLOTS)  # [T] int64
    while True:
        begin = claim(job + 8 * fields.NEXT_TASK) * fields.WRITE_TOKENS
        if begin >= num_tokens:
            return
        for token in range(begin, min(begin + fields.WRITE_TOKENS, num_tokens)):
            slot = load_i64(slots + 8 * token)
            if slot < 0:  # padding
                continue
            block, offset = slot // block_size, slot % block_size
            key = field(job, fields.KEY) + block * field(job, fields.KEY_BLOCK)
            key += offset * field(job, fields.KEY_SLOT)
            value = field(job, fields.VALUE) + block * field(job, fields.VALUE_BLOCK)
            value += offset * field(job, fields.VALUE_SLOT)
            new_key = field(job, fields.NEW_KEY) + token * field(job, fields.NEW_KEY_TOKEN)
            new_value = field(job, fields.NEW_VALUE)
            new_value += token * field(job, fields.NEW_VALUE_TOKEN)
            for head in range(num_kv_heads):
                copy_bytes(
                    key + head * field(job, fields.KEY_HEAD),
                    new_key + head * field(job, fields.NEW_KEY_HEAD),
                    row_bytes,
                )
                copy_bytes(
                    value + head * field(job, fields.VALUE_HEAD),
                    new_value + head * field(job, fields.NEW_VALUE_HEAD),
                    row_bytes,
                )
