"""The CPU kernel that looks up rows of packed weights: embeddings tied to the output layer."""

from functools import cache

import torch
from numba import njit

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.elementwise.lookup_kernel import row_at
from kernels.cpu.linear.linear_arguments import PANEL
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import claim_task, field, item_bytes, load_element, store_element

# Consecutive bytes of one output's inputs, see weight_packing.
_TOGETHER_BYTES = 4


@njit
def unpack_tasks(args, weight_tag, tag):
    """Copy the row of each index out of a packed weight."""
    num_indices, table = field(args, fields.NUM_INDICES), field(args, fields.TABLE)
    in_features = field(args, fields.UNPACKED_FEATURES)
    row_bytes = in_features * item_bytes(tag)
    panel_bytes = PANEL * in_features * item_bytes(weight_tag)
    while True:
        begin = claim_task(args) * fields.LOOKUP_TASK_ROWS
        if begin >= num_indices:
            return
        for at in range(begin, min(begin + fields.LOOKUP_TASK_ROWS, num_indices)):
            out = field(args, fields.LOOKED_UP) + at * row_bytes
            index = row_at(args, at, out, row_bytes)
            if index >= 0:
                first = table + index // PANEL * panel_bytes + index % PANEL * _TOGETHER_BYTES
                _unpack_row(first, out, in_features, weight_tag, tag)


@njit
def _unpack_row(first, out, in_features, weight_tag, tag):
    together = _TOGETHER_BYTES // item_bytes(weight_tag)
    for begin in range(0, in_features, together):
        for place in range(together):
            number = load_element(weight_tag, first + place * item_bytes(weight_tag))
            store_element(tag, out + (begin + place) * item_bytes(tag), number)
        first += PANEL * _TOGETHER_BYTES


@cache
def unpack_kernel(weight: torch.dtype, dtype: torch.dtype) -> Kernel:
    """Lookups of rows in packed weights of one type, as elements of another.

    Raises:
        ValueError: no kernel serves the types.
    """
    weight_tag, tag = element_tag(weight), element_tag(dtype)
    return compile_kernel(unpack_tasks, fields.TOKEN_LOOKUP_LAYOUT, weight_tag, tag)
