"""The CPU kernel that takes rows out of packed weights: embeddings that are the output layer's."""

from numba import njit

from kernels.cpu.elementwise.lookup_kernel import row_at
from kernels.cpu.linear.linear_arguments import PANEL
from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import claim, field, item_bytes, load_element, store_element

# Of each output so much of its inputs lies together, see weight_packing.
_TOGETHER_BYTES = 4


@njit
def unpack_tasks(job, weight_tag, tag):
    """Copy a row of a packed weight for each index."""
    num_indices, table = field(job, fields.NUM_INDICES), field(job, fields.TABLE)
    in_features = field(job, fields.UNPACKED_FEATURES)
    row_bytes = in_features * item_bytes(tag)
    panel_bytes = PANEL * in_features * item_bytes(weight_tag)
    while True:
        begin = claim(job + 8 * fields.NEXT_TASK) * fields.LOOKUP_TASK_ROWS
        if begin >= num_indices:
            return
        for at in range(begin, min(begin + fields.LOOKUP_TASK_ROWS, num_indices)):
            out = field(job, fields.LOOKED_UP) + at * row_bytes
            index = row_at(job, at, out, row_bytes)
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
