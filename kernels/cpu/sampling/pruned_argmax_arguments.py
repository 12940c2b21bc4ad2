"""Arguments of the kernels of ``pruned_argmax``: a row of int64 numbers (see kernel_arguments).

Three kernels, one after the other, read the same fields.
"""

from collections.abc import Sequence

from kernels.cpu.runtime.kernel_arguments import ArgumentLayout

# Behind the two counters that threads share:
INPUT, INPUT_ROW = 2, 3  # bfloat16
NUM_ROWS = 4
SCRATCH, SCRATCH_BYTES = 5, 6  # per thread
IN_FEATURES, OUT_FEATURES = 7, 8
WEIGHT = 9  # of the layer, packed, see weight_packing
QUANTIZED, SCALES, ERRORS, NORMS = 10, 11, 12, 13  # of the weights, see quantized_weights
QUANTIZED_ROWS, ROW_BYTES = 14, 15  # int8, of the inputs; of one row
STATS = 16  # statistics of the inputs, see below
NUM_RESIDUALS = 17  # address of an int32: rows whose residuals are quantized, too
RESIDUAL = 18  # float32 [K], quantization error of a row
BOUNDS, BOUNDS_ROW = 19, 20  # float32: upper bound of the outputs of each panel
MAX_PANELS = 21  # that are computed for one row
TOKENS, VALUES = 22, 23  # int64 and float32, of each row


def _multiplications(args: Sequence[int]) -> int:
    return args[IN_FEATURES] * args[OUT_FEATURES] // 3  # one of three kernels multiplies


PRUNED_ARGMAX_LAYOUT = ArgumentLayout(
    24, rows=NUM_ROWS, scratch=SCRATCH, multiplications=_multiplications
)

# Statistics of one row, in bytes. With q its quantized input and r its quantized residual, the
# input is SCALE * q + RESIDUAL_SCALE * r + a last residual.
SCALE, RESIDUAL_SCALE = 0, 4  # float32
NORM = 8  # float32, of the input; NaN: the row has no bounds
RESIDUAL_NORM = 12  # float32, of the last residual
OFFSET, RESIDUAL_OFFSET = 16, 20  # int32, by which sums are too large: weights have a zero point
RESIDUAL_ROW = 24  # int32, index of its quantized residual
SUMS = 64  # float32 [16], of the panel that is computed
STATS_BYTES = 128

# Up to so many rows, reading weights takes longer than multiplying: residuals cost nothing then.
FEW_ROWS = 8
# With more rows, residuals above this share of the input are quantized. 0.007 to 0.013 is what was
# seen; with a few large numbers among small ones it is more.
LARGE_RESIDUAL = 0.02
# Bytes of an output's weights whose products are summed before the sums go back to memory.
DEPTH = 1024
# Quantized numbers are from -127 to 127; those of weights are stored with this added.
ZERO_POINT = 128
