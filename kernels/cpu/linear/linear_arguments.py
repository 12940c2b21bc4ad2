"""Arguments of layers other than attention: rows of int64 numbers (see kernel_arguments)."""

# Every job starts with two counters that its threads share.
NEXT_TASK = 0
NEXT_THREAD = 1

INPUT, INPUT_ROW = 2, 3
NUM_ROWS = 4
CHUNK_ROWS = 5  # rows that one task handles
SCRATCH, SCRATCH_BYTES = 6, 7  # per thread
WEIGHT = 8  # packed, see weight_packing
IN_FEATURES = 9
NUM_GROUPS = 10
EPILOGUE = 11
ADDEND, ADDEND_ROW = 12, 13  # added to the output, of the output's type; zero for none
# Layers that share their input: for each of them these numbers, behind the last one NUM_GROUPS.
SEGMENTS = 14
FIRST_GROUP, OUT, OUT_ROW, OUT_FEATURES, BIAS = range(5)  # bias: float32, zero for none
SEGMENT_FIELDS = 5
MOST_SEGMENTS = 3
LINEAR_FIELDS = SEGMENTS + MOST_SEGMENTS * SEGMENT_FIELDS + 1

# Epilogues.
PLAIN = 0
SILU_GATED = 1  # panels alternate: sixteen outputs of the gate, sixteen of up

# Outputs of a panel: the lanes of a vector.
PANEL = 16
# Panels of a task. A layer is filled up with zeros to a multiple of it.
GROUP = 4
GROUP_OUTPUTS = GROUP * PANEL
TILE_ROW = 4 * GROUP_OUTPUTS
# Inputs whose products are summed before the sums go back to memory, so that weights and rows stay
# in the fastest cache. Sums go on where they were: the order is that of the inputs all the same.
DEPTH = 512
MOST_CHUNK_ROWS = 96
# Rows of a register block at most; a block may reach beyond the last row.
MOST_BLOCK_ROWS = 12

# Normalization.
NORM_INPUT, NORM_INPUT_ROW = 2, 3
NORM_OUT, NORM_OUT_ROW = 4, 5
NORM_ROWS, NORM_DIM = 6, 7
NORM_WEIGHT = 8  # float32
NORM_EPSILON = 9  # float32 bits
NORM_BIAS = 10  # float32; read where means are subtracted
NORM_FIELDS = 11
# Rows that one task normalizes.
NORM_TASK_ROWS = 8

# Rotary embeddings; outputs are contiguous.
QUERY, QUERY_TOKEN, QUERY_HEAD, QUERY_OUT = 2, 3, 4, 5
KEY, KEY_TOKEN, KEY_HEAD, KEY_OUT = 6, 7, 8, 9
COS, COS_TOKEN = 10, 11
SIN, SIN_TOKEN = 12, 13
ROTARY_TOKENS = 14
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 15, 16, 17
ROTARY_DIM = 18  # elements of a head that are turned; the rest is copied
ROTARY_FIELDS = 19
# Tokens that one task turns.
ROTARY_TASK_TOKENS = 8

# Sums of two tensors, all contiguous.
LEFT, RIGHT, SUM = 2, 3, 4
ADD_ELEMENTS = 5
ADD_FIELDS = 6
# Elements that one task adds.
ADD_TASK_ELEMENTS = 4096

# Activations, all contiguous.
ACTIVATED, FACTOR, ACTIVATE_OUT = 2, 3, 4  # no factor: zero
ACTIVATE_ELEMENTS = 5
ACTIVATION = 6
SLOPE = 7  # float32 bits, of what is linear
ACTIVATE_FIELDS = 8
# Elements that one task computes.
ACTIVATE_TASK_ELEMENTS = 1024
# Which function.
LINEAR, RELU, GELU, GELU_TANH = range(4)


def widened_stride(in_features: int) -> int:
    """Bytes from row to row of widened inputs; the odd line keeps rows apart in the caches."""
    return 4 * in_features + 64


def scratch_bytes(chunk_rows: int, in_features: int) -> int:
    """Scratch of one thread: sums [chunk, GROUP_OUTPUTS] and rows as they are multiplied."""
    sums = (chunk_rows + MOST_BLOCK_ROWS) * TILE_ROW
    return -(-(sums + chunk_rows * widened_stride(in_features)) // 4096) * 4096
