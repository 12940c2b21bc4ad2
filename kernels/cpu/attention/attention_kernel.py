"""The CPU kernel of paged attention: tiles of query rows claimed by threads.

Threads enter the kernel at the same time; each claims tasks from the job's counter until none is
left. A task is one tile of query tokens of one sequence under one KV head, so keys and values are
read once for the whole group of query heads; or, where there are few rows, under several KV heads.
"""

from numba import njit

from kernels.cpu.attention.decode_tile import attend_rows
from kernels.cpu.attention.prefill_tile import attend_columns
from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import claim, field, load_i32


@njit
def attend_tasks(job, tag):
    """Claim tiles until none is left.

    ``tag`` types the elements (see simd), or says that they are multiplied by pairs (see
    bf16_dot).
    """
    num_seqs = field(job, fields.NUM_SEQS)
    num_kv_heads = field(job, fields.NUM_KV_HEADS)
    group = field(job, fields.GROUP)
    tile_tokens = field(job, fields.TILE_TOKENS)
    lens = field(job, fields.CONTEXT_LENS)  # [S] int32
    starts = field(job, fields.QUERY_STARTS)  # [S + 1] int32
    column_rows = field(job, fields.COLUMN_ROWS)
    thread = claim(job + 8 * fields.NEXT_THREAD)
    scratch = field(job, fields.SCRATCH) + thread * field(job, fields.SCRATCH_BYTES)
    # Heads of a task with few rows, as long as there are enough tasks.
    most_heads = min(num_kv_heads, num_seqs * num_kv_heads // field(job, fields.FEWEST_TASKS))
    # Tasks are numbered sequence by sequence; a thread's claims only grow, so it walks along.
    sequence = -1
    tasks_before, tasks_here = 0, 0
    heads, parts = 1, 1
    while True:
        task = claim(job + 8 * fields.NEXT_TASK)
        while task >= tasks_before + tasks_here:
            tasks_before += tasks_here
            sequence += 1
            if sequence >= num_seqs:
                return
            rows = load_i32(starts + 4 * sequence + 4) - load_i32(starts + 4 * sequence)
            heads = 1
            if rows * group < column_rows:
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
        if num_tokens * group < column_rows:
            num_heads = min(heads, num_kv_heads - head)
            attend_rows(
                job, tag, scratch, sequence, head, num_heads, start + first, num_tokens, position
            )
        else:
            attend_columns(job, tag, scratch, sequence, head, start + first, num_tokens, position)
