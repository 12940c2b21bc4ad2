"""The CPU kernel of sums of two tensors, such as residual connections."""

from functools import cache

import torch
from numba import njit

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.linear.linear_ir import sum_chunk
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import claim_task, field, item_bytes, load_element, store_element
from kernels.cpu.runtime.simd import LANES


@njit
def add_tasks(args, tag):
    """sum = left + right for all elements, in float32, then rounded."""
    elements = field(args, fields.ADD_ELEMENTS)
    left, right, out = (
        field(args, fields.LEFT),
        field(args, fields.RIGHT),
        field(args, fields.SUM),
    )
    while True:
        at = claim_task(args) * fields.ADD_TASK_ELEMENTS
        if at >= elements:
            return
        stop = min(at + fields.ADD_TASK_ELEMENTS, elements)
        while at + LANES <= stop:
            begin = at * item_bytes(tag)
            sum_chunk(tag, left + begin, right + begin, out + begin)
            at += LANES
        while at < stop:
            begin = at * item_bytes(tag)
            total = load_element(tag, left + begin) + load_element(tag, right + begin)
            store_element(tag, out + begin, total)
            at += 1


@cache
def add_kernel(dtype: torch.dtype) -> Kernel:
    """Sums of elements of a type.

    Raises:
        ValueError: no kernel serves the type.
    """
    return compile_kernel(add_tasks, fields.ADD_LAYOUT, element_tag(dtype))
