"""The CPU kernel that moves whole blocks of all layers."""

from functools import cache

from numba import njit

from kernels.cpu.blocks import move_arguments as fields
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel
from kernels.cpu.runtime.memory import claim_task, copy_bytes, field, load_i64


@njit
def move_tasks(args):
    """Copy one pair of blocks per task, in all tensors, in as few pieces as strides allow."""
    num_pairs = field(args, fields.NUM_PAIRS)
    num_tensors = field(args, fields.NUM_TENSORS)
    sources, targets = field(args, fields.SOURCES), field(args, fields.TARGETS)  # [P] int64
    while True:
        pair = claim_task(args)
        if pair >= num_pairs:
            return
        source_block = load_i64(sources + 8 * pair)
        target_block = load_i64(targets + 8 * pair)
        for tensor in range(num_tensors):
            row = field(args, fields.TENSORS) + 8 * fields.TENSOR_FIELDS * tensor
            source = field(row, fields.FROM) + source_block * field(row, fields.FROM_BLOCK)
            target = field(row, fields.TO) + target_block * field(row, fields.TO_BLOCK)
            for outer in range(field(row, fields.NUM_OUTER)):
                for inner in range(field(row, fields.NUM_INNER)):
                    copy_bytes(
                        target
                        + outer * field(row, fields.TO_OUTER)
                        + inner * field(row, fields.TO_INNER),
                        source
                        + outer * field(row, fields.FROM_OUTER)
                        + inner * field(row, fields.FROM_INNER),
                        field(row, fields.PIECE_BYTES),
                    )


@cache
def move_kernel() -> Kernel:
    """Moves of whole blocks, of elements of any type."""
    return compile_kernel(move_tasks, fields.MOVE_LAYOUT)
