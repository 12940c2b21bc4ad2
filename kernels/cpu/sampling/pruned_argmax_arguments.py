"""What the kernels of ``pruned_argmax`` are told: rows of int64 numbers (see kernel_arguments).

Three kernels, one after the other, read the same fields.
"""

# Behind the two counters that threads share:
INPUT, INPUT_ROW = 2, 3  # bfloat16
NUM_ROWS = 4
SCRATCH, SCRATCH_BYTES = 5, 6  # per thread
IN_FEATURES, OUT_FEATURES = 7, 8
WEIGHT = 9  # of the layer, packed, see weight_packing
CODES, SCALES, ERRORS, NORMS = 10, 11, 12, 13  # of the weights, see quantized_weights
ROW_CODES, ROW_BYTES = 14, 15  # int8, of the inputs; of one row
FACTS = 16  # about the inputs
NUM_FINE = 17  # address of an int32: rows that have finer codes, too
REST = 18  # float32 [K], what codes leave of a row
BOUNDS, BOUNDS_ROW = 19, 20  # float32: what the outputs of each panel do not exceed
MOST_PANELS = 21  # that are computed for one row
TOKENS, BEST = 22, 23  # int64 and float32, of each row
SCREEN_FIELDS = 24

# Of each row, in bytes. Its input is SCALE * codes + FINE_SCALE * finer codes + a rest.
SCALE, FINE_SCALE = 0, 4  # float32
SIZE = 8  # float32, norm of the input; no number where nothing is to be said of the row
REST_SIZE = 12  # float32, norm of the rest
OFFSET, FINE_OFFSET = 16, 20  # int32, by which sums are too large, since weights have no sign
FINE_ROW = 24  # int32, where its finer codes are
SUMS = 64  # float32 [16], of the panel that is computed
OUTPUTS = 128  # bfloat16 [16]
FACT_BYTES = 192

# Rows up to which reading weights takes longer than multiplying: finer codes cost nothing then.
FINE_ROWS = 8
# Others have finer codes where the rest is more than this share of the input. 0.007 to 0.013
# is what was seen; with a few large numbers among small ones it is more.
COARSE = 0.02
# Bytes of an output's weights whose products are summed before the sums go back to memory.
DEPTH = 1024
# Codes are from -127 to 127; those of weights are moved up by so much.
MOVED = 128
