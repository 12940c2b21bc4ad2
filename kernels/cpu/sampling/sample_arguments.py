"""What the kernel that draws tokens is told: a row of int64 numbers (see kernel_arguments)."""

# Behind the two counters that threads share:
LOGITS, LOGITS_ROW = 2, 3
VOCAB_SIZE = 4
NUM_DRAWN = 5
ROWS = 6  # int64, which rows of the logits are drawn from
TEMPERATURE, TOP_P, MIN_P = 7, 8, 9  # float32, of each of them
TOP_K = 10  # int64
KEYS, MORE_KEYS = 11, 12  # uint32
TOKENS = 13  # int64 of all rows: the likeliest, in the end what was drawn
SCRATCH, SCRATCH_BYTES = 14, 15  # per thread
DRAW_FIELDS = 16

# Tokens are sorted into bins by their distance to the likeliest; what lies farther than the last
# bin has less than e^-32 of its probability.
NUM_BINS = 2048
BINS_PER_UNIT = NUM_BINS / 32.0


def padded(vocab_size: int) -> int:
    """Of a row, in whole vectors."""
    return -(-vocab_size // 16) * 16


def scratch_bytes(vocab_size: int) -> int:
    """Of a thread: two rows of float32, bins' counts and masses, and a vector of either."""
    return 8 * padded(vocab_size) + 16 * NUM_BINS + 128
