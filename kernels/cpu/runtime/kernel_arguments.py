"""What a CPU kernel is told: a row of int64 numbers, mostly addresses and strides in bytes.

One address crosses from Python to the kernel, instead of ten arrays whose unpacking would cost
more than a small kernel runs.
"""

import struct

# Every job starts with two counters that its threads share.
NEXT_TASK = 0
NEXT_THREAD = 1

# Attention.
QUERY, QUERY_TOKEN, QUERY_HEAD = 2, 3, 4
OUT, OUT_TOKEN, OUT_HEAD = 5, 6, 7
KEY, KEY_BLOCK, KEY_HEAD, KEY_SLOT = 8, 9, 10, 11
VALUE, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT = 12, 13, 14, 15
TABLES, TABLE_ROW = 16, 17
CONTEXT_LENS, QUERY_STARTS, NUM_SEQS = 18, 19, 20
NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 21, 22, 23, 24
TILE_TOKENS = 25  # query tokens that one task serves
WINDOW = 26  # larger than any context where there is none
SCALE, SOFTCAP = 27, 28  # float32 bits; a soft-cap of zero is none
SCRATCH, SCRATCH_BYTES = 29, 30  # per thread
FEWEST_TASKS = 31  # heads share a task as long as there are so many
COLUMN_ROWS = 32  # from so many rows of a tile on, the lanes of a vector are rows
ATTEND_FIELDS = 33

# Cache write; KEY* and VALUE* above are the cache.
NEW_KEY, NEW_KEY_TOKEN, NEW_KEY_HEAD = 2, 3, 4
NEW_VALUE, NEW_VALUE_TOKEN, NEW_VALUE_HEAD = 5, 6, 7
SLOTS, NUM_TOKENS = 16, 17
ROW_BYTES = 18
WRITE_FIELDS = 25

# Moves of whole blocks.
TENSORS, NUM_TENSORS = 2, 3
SOURCES, TARGETS, NUM_PAIRS = 4, 5, 6
MOVE_FIELDS = 7
# Of each tensor: a block is NUM_OUTER x NUM_INNER pieces.
FROM, FROM_BLOCK, FROM_OUTER, FROM_INNER = 0, 1, 2, 3
TO, TO_BLOCK, TO_OUTER, TO_INNER = 4, 5, 6, 7
NUM_OUTER, NUM_INNER, PIECE_BYTES = 8, 9, 10
TENSOR_FIELDS = 11

# Lookups of rows, in tables or in packed weights.
TABLE, TABLE_ROWS = 2, 3
TABLE_ROW_BYTES = UNPACKED_FEATURES = 4
INDICES, NUM_INDICES = 5, 6
LOOKED_UP = 7
LOOKUP_FIELDS = 8
# Rows that one task looks up.
LOOKUP_TASK_ROWS = 8

# A tape: jobs that follow each other.
ENTRIES, NUM_ENTRIES = 2, 3
TEAM_SIZE, GIVE_WAY = 4, 5  # functions without arguments that return an int32; zero for none
STATE = 8  # on a cache line of its own, since threads wait for it
TAPE_FIELDS = 16
# Of each job.
KERNEL, JOB = 0, 1
OFFERED = 2  # whether threads offer their cores to others behind it
ENTRY_FIELDS = 4

# Keys whose scores are held at a time. Tiles end at multiples of this position, so that a row's
# sums do not depend on where its prompt was cut into chunks.
KV_TILE = 64
# Query rows (tokens x query heads of a KV head, or of several) that one task handles.
MAX_TILE_ROWS = 64
# From so many on it is faster if the lanes of a vector are query rows instead of parts of one head.
FASTER_COLUMN_ROWS = 9
# Tokens that one task of a cache write stores.
WRITE_TOKENS = 32


def padded_rows(group: int) -> int:
    """Rows that a thread's scratch holds: a tile, rounded up to whole vectors."""
    return -(-max(MAX_TILE_ROWS, group) // 16) * 16


def scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch of one thread: address tables of two tiles, queries, sums, scores, row statistics.

    And weights and values in pairs.
    """
    rows = padded_rows(group)
    floats = 2 * rows * head_dim + rows * KV_TILE + 3 * rows
    floats += KV_TILE // 2 * (rows + head_dim)
    return 2 * 2 * 8 * KV_TILE + 4 * floats


def float_bits(number: float) -> int:
    """The bits of a float32, in the low half of an int64."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits
