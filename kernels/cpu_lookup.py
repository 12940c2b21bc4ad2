"""The CPU kernel that looks rows up in a table: embeddings of tokens, angles of positions."""

from numba import njit

from kernels import cpu_jobs as fields
from kernels.cpu_memory import claim, copy_bytes, field, fill_bytes, load_i64


@njit
def lookup_tasks(job):
    """Copy a row for each index; elements are just bytes.

    A row that the table does not have is all ones, which is no number in any type.
    """
    num_indices = field(job, fields.NUM_INDICES)
    table, table_rows = field(job, fields.TABLE), field(job, fields.TABLE_ROWS)
    row_bytes = field(job, fields.TABLE_ROW_BYTES)
    while True:
        begin = claim(job + 8 * fields.NEXT_TASK) * fields.LOOKUP_TASK_ROWS
        if begin >= num_indices:
            return
        for at in range(begin, min(begin + fields.LOOKUP_TASK_ROWS, num_indices)):
            index = load_i64(field(job, fields.INDICES) + 8 * at)
            out = field(job, fields.LOOKED_UP) + at * row_bytes
            if 0 <= index < table_rows:
                copy_bytes(out, table + index * row_bytes, row_bytes)
            else:
                fill_bytes(out, 0xFF, row_bytes)
