"""Arguments of normalization, rotary embeddings, sums, activations and lookups."""

from kernels.cpu.runtime.kernel_arguments import ArgumentLayout, StepField

# Normalization.
NORM_INPUT, NORM_INPUT_ROW = 2, 3
NORM_OUT, NORM_OUT_ROW = 4, 5
NORM_ROWS, NORM_DIM = 6, 7
NORM_WEIGHT = 8  # float32
NORM_EPSILON = 9  # float32 bits
NORM_BIAS = 10  # float32; not read by RMS normalization
NORM_LAYOUT = ArgumentLayout(11, rows=NORM_ROWS)
# Rows that one task normalizes.
NORM_TASK_ROWS = 8

# Rotary embeddings; outputs are contiguous.
QUERY, QUERY_TOKEN, QUERY_HEAD, QUERY_OUT = 2, 3, 4, 5
KEY, KEY_TOKEN, KEY_HEAD, KEY_OUT = 6, 7, 8, 9
COS, COS_TOKEN = 10, 11
SIN, SIN_TOKEN = 12, 13
ROTARY_TOKENS = 14
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 15, 16, 17
ROTARY_DIM = 18  # elements of a head that are rotated; the rest is copied
ROTARY_LAYOUT = ArgumentLayout(19, rows=ROTARY_TOKENS)
# Tokens that one task rotates.
ROTARY_TASK_TOKENS = 8

# Sums of two contiguous tensors.
LEFT, RIGHT, SUM = 2, 3, 4
ADD_ELEMENTS = 5
ADD_LAYOUT = ArgumentLayout(6, rows=ADD_ELEMENTS)
# Elements that one task adds.
ADD_TASK_ELEMENTS = 4096

# Activations of contiguous tensors.
ACTIVATED, FACTOR, ACTIVATE_OUT = 2, 3, 4  # no factor: zero
ACTIVATE_ELEMENTS = 5
ACTIVATION = 6  # one of the functions below
SLOPE = 7  # float32 bits, of the linear function
ACTIVATION_LAYOUT = ArgumentLayout(8, rows=ACTIVATE_ELEMENTS)
# Elements that one task computes.
ACTIVATE_TASK_ELEMENTS = 1024
LINEAR, RELU, GELU, GELU_TANH = range(4)

# Lookups of rows, in tables or in packed weights.
TABLE, TABLE_ROWS = 2, 3
TABLE_ROW_BYTES = UNPACKED_FEATURES = 4
INDICES, NUM_INDICES = 5, 6
LOOKED_UP = 7
TOKEN_LOOKUP_LAYOUT = ArgumentLayout(
    8, rows=NUM_INDICES, step_fields=((INDICES, StepField.TOKEN_IDS),)
)
POSITION_LOOKUP_LAYOUT = ArgumentLayout(
    8, rows=NUM_INDICES, step_fields=((INDICES, StepField.POSITIONS),)
)
# Rows that one task looks up.
LOOKUP_TASK_ROWS = 8
