"""Arguments of moves of whole blocks."""

from kernels.cpu.runtime.kernel_arguments import ArgumentLayout

TENSORS, NUM_TENSORS = 2, 3
SOURCES, TARGETS, NUM_PAIRS = 4, 5, 6
MOVE_LAYOUT = ArgumentLayout(7)

# Of each tensor: a block is NUM_OUTER x NUM_INNER pieces.
FROM, FROM_BLOCK, FROM_OUTER, FROM_INNER = 0, 1, 2, 3
TO, TO_BLOCK, TO_OUTER, TO_INNER = 4, 5, 6, 7
NUM_OUTER, NUM_INNER, PIECE_BYTES = 8, 9, 10
TENSOR_FIELDS = 11
