"""The CPU kernel of sums, such as those of a layer's input and output."""

from numba import njit

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.linear_ir import sum_chunk
from kernels.cpu.runtime.memory import claim, field, item_bytes, load_element, store_element


@njit
def add_tasks(job, tag):
    """Claim elements until none is left: sum = left + right in float32, then rounded."""
    elements = field(job, fields.ADD_ELEMENTS)
    left, right, out = (
        field(job, fields.LEFT),
        field(job, fields.RIGHT),
        field(job, fields.SUM),
    )
    while True:
        at = claim(job + 8 * fields.NEXT_TASK) * fields.ADD_TASK_ELEMENTS
        if at >= elements:
            return
        stop = min(at + fields.ADD_TASK_ELEMENTS, elements)
        while at + fields.PANEL <= stop:
            begin = at * item_bytes(tag)
            sum_chunk(tag, left + begin, right + begin, out + begin)
            at += fields.PANEL
        while at < stop:
            begin = at * item_bytes(tag)
            total = load_element(tag, left + begin) + load_element(tag, right + begin)
            store_element(tag, out + begin, total)
            at += 1
