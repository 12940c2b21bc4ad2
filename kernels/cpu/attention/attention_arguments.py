"""Arguments of attention and of cache writes, their tile sizes and scratch memory."""

from kernels.cpu.amx.tiles import ROWS, STATE_BYTES
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout, StepField

# Attention.
QUERY, QUERY_TOKEN, QUERY_HEAD = 2, 3, 4
OUT, OUT_TOKEN, OUT_HEAD = 5, 6, 7
KEY, KEY_BLOCK, KEY_HEAD, KEY_SLOT = 8, 9, 10, 11
VALUE, VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT = 12, 13, 14, 15
TABLES, TABLE_ROW = 16, 17
CONTEXT_LENS, QUERY_STARTS, NUM_SEQS = 18, 19, 20
NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 21, 22, 23, 24
TILE_TOKENS = 25  # query tokens of one task
WINDOW = 26  # larger than any context where there is none
SCALE, SOFTCAP = 27, 28  # float32 bits; a soft-cap of zero is none
SCRATCH, SCRATCH_BYTES = 29, 30  # per thread
FEWEST_TASKS = 31  # heads share a task as long as there are so many tasks
PREFILL_TILE_ROWS = 32  # a tile of so many rows, or more, is a prefill tile
# Scales of tokens, float32, of keys and values in eight bits; of cache writes, too.
KEY_SCALE, KEY_SCALE_BLOCK, KEY_SCALE_HEAD, KEY_SCALE_SLOT = 33, 34, 35, 36
VALUE_SCALE, VALUE_SCALE_BLOCK, VALUE_SCALE_HEAD, VALUE_SCALE_SLOT = 37, 38, 39, 40
ATTENTION_LAYOUT = ArgumentLayout(
    41,
    scratch=SCRATCH,
    step_fields=(
        (TABLES, StepField.TABLES),
        (TABLE_ROW, StepField.TABLE_ROW),
        (CONTEXT_LENS, StepField.CONTEXT_LENS),
        (QUERY_STARTS, StepField.QUERY_STARTS),
        (NUM_SEQS, StepField.NUM_SEQS),
    ),
)

# Cache writes; KEY*, VALUE*, NUM_KV_HEADS, HEAD_DIM and BLOCK_SIZE above describe the cache.
NEW_KEY, NEW_KEY_TOKEN, NEW_KEY_HEAD = 2, 3, 4
NEW_VALUE, NEW_VALUE_TOKEN, NEW_VALUE_HEAD = 5, 6, 7
SLOTS, NUM_TOKENS = 16, 17
ROW_BYTES = 18
CACHE_WRITE_LAYOUT = ArgumentLayout(41, rows=NUM_TOKENS, step_fields=((SLOTS, StepField.SLOTS),))

# Keys whose scores are held at a time. Tiles end at multiples of this position, so that a row's
# sums do not depend on where its prompt was cut into chunks.
KV_TILE = 64
# Query rows (tokens x query heads of a KV head, or of several) of one task at most.
MAX_TILE_ROWS = 64
# The rows from which on a prefill tile is faster than a decode tile.
FASTER_PREFILL_TILE_ROWS = 9
# Tokens that one task of a cache write stores.
WRITE_TOKENS = 32


def padded_rows(group: int) -> int:
    """Rows that a thread's scratch holds: a tile, rounded up to whole vectors."""
    return -(-max(MAX_TILE_ROWS, group) // 16) * 16


def scratch_bytes(group: int, head_dim: int, widened: bool = False) -> int:
    """Scratch of one thread.

    It holds address tables of two tiles, scales of one, queries, sums, scores and row statistics,
    weights and values as bf16 pairs, with AMX zeros behind transposed keys and the state of its
    tiles, and, if they are ``widened``, keys and values of a tile.
    """
    rows = padded_rows(group)
    floats = 2 * rows * head_dim + rows * KV_TILE + 3 * rows
    floats += KV_TILE // 2 * (rows + head_dim) + 2 * KV_TILE
    floats += (ROWS // 2 + 1) * KV_TILE
    if widened:
        floats += 2 * KV_TILE * head_dim
    return 2 * 2 * 8 * KV_TILE + 4 * floats + STATE_BYTES
