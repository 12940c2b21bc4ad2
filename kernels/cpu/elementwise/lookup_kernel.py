"""The CPU kernel that looks rows up in a table: embeddings of tokens, angles of positions."""

from numba import njit

from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import claim, copy_bytes, field, fill_bytes, load_i64


@njit
def lookup_tasks(job):
    """Copy a row for each index; elements are just bytes."""
    num_indices, table = field(job, fields.NUM_INDICES), field(job, fields.TABLE)
    row_bytes = field(job, fields.TABLE_ROW_BYTES)
    while True:
        begin = claim(job + 8 * fields.NEXT_TASK) * fields.LOOKUP_TASK_ROWS
        if begin >= num_indices:
            return
        for at in range(begin, min(begin + fields.LOOKUP_TASK_ROWS, num_indices)):
            out = field(job, fields.LOOKED_UP) + at * row_bytes
            index = row_at(job, at, out, row_bytes)
            if index >= 0:
                copy_bytes(out, table + index * row_bytes, row_bytes)


@njit
def row_at(job, at, out, row_bytes):
    """The row that is asked for; where there is none it is -1.

    Then ``out`` is filled with ones, which are no number in any type.
    """
    index = load_i64(field(job, fields.INDICES) + 8 * at)
    if 0 <= index < field(job, fields.TABLE_ROWS):
        return index
    fill_bytes(out, 0xFF, row_bytes)
    return -1
