"""Splits attention into pieces of work, on the device, by the lengths of sequences.

A *tile* is some query tokens of one sequence under one KV head; a *piece* is a part of a tile's
keys. The grid depends on bounds that are known on the host, and every program finds its own piece.
So a launch that is captured in a graph serves any lengths.
"""

import triton
import triton.language as tl


@triton.jit
def cut_work(  # type: ignore[no-untyped-def]
    context_lens,  # [S] int32
    query_starts,  # [S + 1] int32
    num_seqs,
    window,
    capacity,  # pieces per KV head among which all keys are spread
    SEQS: tl.constexpr,  # S rounded up to a power of two
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_PIECE_TILES: tl.constexpr,
    FIXED_PIECE_TILES: tl.constexpr,  # 0: as many pieces as the batch has room for
    MOST_FIXED_PIECES: tl.constexpr,
):
    """Tiles [SEQS] of each sequence, and pieces [SEQS] of each of its tiles.

    Sequences of up to SHORT_TOKENS rows are served by the launch for short ones, longer ones by
    the other; here the others have no tiles. A piece holds at least the average of all keys over
    ``capacity``, so that there are at most ``capacity`` more pieces than tiles. With a fixed size
    of pieces a sequence is split by its own length, and not by the rest of the batch.
    """
    sequence = tl.arange(0, SEQS)  # [S']
    exists = sequence < num_seqs  # [S']
    first_row = tl.load(query_starts + sequence, mask=exists, other=0)
    num_rows = tl.load(query_starts + sequence + 1, mask=exists, other=0) - first_row
    context_len = tl.load(context_lens + sequence, mask=exists, other=0)
    served = (num_rows > 0) & (context_len > 0)
    served = served & (num_rows <= SHORT_TOKENS if SHORT else num_rows > SHORT_TOKENS)
    tiles = tl.where(served, (num_rows + TILE_TOKENS - 1) // TILE_TOKENS, 0)  # [S']
    if SPLIT:
        keys = context_len
        if HAS_WINDOW:
            keys = tl.minimum(keys, tl.minimum(num_rows, TILE_TOKENS) + window)
        key_tiles = (keys + TILE_KEYS - 1) // TILE_KEYS  # [S']
        if FIXED_PIECE_TILES > 0:
            pieces = (key_tiles + FIXED_PIECE_TILES - 1) // FIXED_PIECE_TILES  # [S']
            pieces = tl.minimum(pieces, MOST_FIXED_PIECES)
        else:
            total = tl.sum(tiles * key_tiles, 0)
            share = tl.maximum((total + capacity - 1) // capacity, MIN_PIECE_TILES)
            pieces = (key_tiles + share - 1) // share
        pieces = tl.maximum(pieces, 1)
    else:
        pieces = tl.full([SEQS], 1, tl.int32)
    return tiles, pieces


@triton.jit
def find_item(counts, item, SEQS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence whose ``counts`` items hold this one, and its number among them.

    The sequence is SEQS if there are fewer items.
    """
    sequence = tl.arange(0, SEQS)
    last = tl.cumsum(counts, 0)  # [S']
    found = tl.sum((last <= item).to(tl.int32), 0)
    before = tl.sum(tl.where(sequence < found, counts, 0), 0)
    return found, item - before


@triton.jit
def value_of(values, sequence, SEQS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One element of ``values`` [SEQS]."""
    return tl.sum(tl.where(tl.arange(0, SEQS) == sequence, values, 0), 0)


@triton.jit
def first_partial(tiles, pieces, sequence, SEQS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the partial results of a sequence begin: what is in one piece needs none."""
    counts = tl.where(pieces > 1, tiles * pieces, 0)
    return tl.sum(tl.where(tl.arange(0, SEQS) < sequence, counts, 0), 0)
