"""The CPU kernel that moves whole blocks of all layers."""

from numba import njit

from kernels.cpu.runtime import kernel_arguments as fields
from kernels.cpu.runtime.memory import claim, copy_bytes, field, load_i64


@njit
def move_tasks(job):
    """One pair of blocks per task: its share of every tensor, as few pieces as strides allow."""
    num_pairs = field(job, fields.NUM_PAIRS)
    num_tensors = field(job, fields.NUM_TENSORS)
    sources, targets = field(job, fields.SOURCES), field(job, fields.TARGETS)  # [P] int64
    while True:
        pair = claim(job + 8 * fields.NEXT_TASK)
        if pair >= num_pairs:
            return
        source_block = load_i64(sources + 8 * pair)
        target_block = load_i64(targets + 8 * pair)
        for tensor in range(num_tensors):
            row = field(job, fields.TENSORS) + 8 * fields.TENSOR_FIELDS * tensor
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
