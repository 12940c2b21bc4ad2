"""The CPU kernel that looks up rows of a table: embeddings of tokens, angles of positions."""

from functools import cache

from numba import njit

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.memory import claim_task, copy_bytes, field, fill_bytes, load_i64


@njit
def lookup_tasks(args):
    """Copy the row of each index, as bytes."""
    num_indices, table = field(args, fields.NUM_INDICES), field(args, fields.TABLE)
    row_bytes = field(args, fields.TABLE_ROW_BYTES)
    while True:
        begin = claim_task(args) * fields.LOOKUP_TASK_ROWS
        if begin >= num_indices:
            return
        for at in range(begin, min(begin + fields.LOOKUP_TASK_ROWS, num_indices)):
            out = field(args, fields.LOOKED_UP) + at * row_bytes
            index = row_at(args, at, out, row_bytes)
            if index >= 0:
                copy_bytes(out, table + index * row_bytes, row_bytes)


@njit
def row_at(args, at, out, row_bytes):
    """The row that index ``at`` names; -1 and NaN in ``out`` if the table has no such row.

    Bytes of ones are NaN in every floating-point type.
    """
    index = load_i64(field(args, fields.INDICES) + 8 * at)
    if 0 <= index < field(args, fields.TABLE_ROWS):
        return index
    fill_bytes(out, 0xFF, row_bytes)
    return -1


@cache
def lookup_kernel(layout: ArgumentLayout) -> Kernel:
    """Lookups of rows of any type; a captured graph patches the indices that the layout names."""
    return compile_kernel(lookup_tasks, layout)
