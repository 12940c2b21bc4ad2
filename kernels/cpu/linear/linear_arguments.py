"""Arguments of linear layers, their tile sizes and scratch memory."""

from collections.abc import Sequence
from dataclasses import replace

from kernels.cpu.amx.tiles import ROW_BYTES, STATE_BYTES, TILE_BYTES
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout

INPUT, INPUT_ROW = 2, 3
NUM_ROWS = 4
CHUNK_ROWS = 5  # rows that one task handles
SCRATCH, SCRATCH_BYTES = 6, 7  # per thread
WEIGHT = 8  # packed, see weight_packing
IN_FEATURES = 9
NUM_GROUPS = 10
EPILOGUE = 11
ADDEND, ADDEND_ROW = 12, 13  # added to the output, of the input's type; zero for none
# Functions of a library (see library_blocks), which multiplies from so many rows of a task on; zero
# for none.
LIBRARY, LIBRARY_RELEASE, LIBRARY_FEWEST_ROWS = 14, 15, 16
# Of quantized weights: bytes of a group of outputs; inputs that share scales, and the bytes of them
# and of their scales, for a group of outputs.
TASK_BYTES, GROUP_INPUTS, GROUP_BYTES, HEADER_BYTES = 17, 18, 19, 20
# These numbers for each of the layers that share their input; behind the last one NUM_GROUPS.
SEGMENTS = 21
FIRST_GROUP, OUT, OUT_ROW, OUT_FEATURES, BIAS = range(5)  # bias: float32, zero for none
SEGMENT_FIELDS = 5
MOST_SEGMENTS = 3

# Epilogues.
PLAIN = 0
SILU_GATED = 1  # panels alternate: sixteen outputs of the gate, sixteen of up
FLOAT32 = 2  # outputs are not rounded to the input's type

# Outputs of a panel: the lanes of a vector.
PANEL = 16
# Panels of a task. A layer is padded with zeros to a multiple of it.
GROUP = 4
GROUP_OUTPUTS = GROUP * PANEL
TILE_ROW = 4 * GROUP_OUTPUTS
# Inputs whose products are summed before the sums go back to memory, so that weights and rows stay
# in the first-level cache. Sums go on where they were: the order is that of the inputs all the
# same.
DEPTH = 512
MOST_CHUNK_ROWS = 96
AMX_MOST_CHUNK_ROWS = 192
# Up to so many rows are one block over all panels of a group.
FEW_QUANTIZED_ROWS = 4
# Dequantized weights of a group of outputs, DEPTH inputs of them.
WIDENED_BYTES = 4 * GROUP_OUTPUTS * DEPTH
# Rows of a register block at most; a block may reach beyond the last row.
MOST_BLOCK_ROWS = 12


def _multiplications(args: Sequence[int]) -> int:
    return args[IN_FEATURES] * args[NUM_GROUPS] * GROUP_OUTPUTS


LINEAR_LAYOUT = ArgumentLayout(
    SEGMENTS + MOST_SEGMENTS * SEGMENT_FIELDS + 1,
    rows=NUM_ROWS,
    chunk_rows=CHUNK_ROWS,
    max_chunk_rows=MOST_CHUNK_ROWS,
    scratch=SCRATCH,
    multiplications=_multiplications,
)
AMX_LINEAR_LAYOUT = replace(LINEAR_LAYOUT, max_chunk_rows=AMX_MOST_CHUNK_ROWS)


def widened_stride(in_features: int) -> int:
    """Bytes from row to row of widened inputs; an odd number of lines keeps rows in other sets of
    the caches.
    """
    return 4 * in_features + 64


def scratch_bytes(chunk_rows: int, in_features: int, *, quantized: bool = False) -> int:
    """Scratch of one thread: sums [chunk, GROUP_OUTPUTS], rows widened to float32, and behind them
    dequantized weights.
    """
    sums = (chunk_rows + MOST_BLOCK_ROWS) * TILE_ROW
    rows = chunk_rows * widened_stride(in_features)
    return -(-(sums + rows) // 4096) * 4096 + (WIDENED_BYTES if quantized else 0)


def amx_scratch_bytes(chunk_rows: int) -> int:
    """The same for AMX: its state, the last weights of each panel of a group and the last inputs of
    each row, both padded with zeros, and sums [chunk, GROUP_OUTPUTS].
    """
    num_bytes = STATE_BYTES + GROUP * TILE_BYTES + chunk_rows * (ROW_BYTES + TILE_ROW)
    return -(-num_bytes // 4096) * 4096
