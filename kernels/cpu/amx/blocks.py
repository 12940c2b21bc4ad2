"""Blocks of AMX tiles: one tile of rows times four panels of weights, or two times two.

Up to sixteen rows are one tile. More are an even number of tiles, each with the same number of
rows: the last tile begins early enough to have as many. Its first rows belong to the tile before
it, too, and get the same bits in both. Sums are in tiles 0 to 3.
"""

from numba import njit

from kernels.cpu.amx import tiles

PANEL_BYTES = tiles.ROW_BYTES  # of a panel's sixteen sums, and of a pair of inputs for them


@njit
def cut(rows):
    """The number of tiles of so many rows, and the number of rows of each."""
    num_tiles = 1 if rows <= tiles.ROWS else (rows + 2 * tiles.ROWS - 1) // (2 * tiles.ROWS) * 2
    return num_tiles, (rows + num_tiles - 1) // num_tiles


@njit
def clear_sums(amx_tag, state):
    """Set all sums to zero."""
    tiles.clear(amx_tag, state, 0)
    tiles.clear(amx_tag, state, 1)
    tiles.clear(amx_tag, state, 2)
    tiles.clear(amx_tag, state, 3)


@njit
def add_one_tile(amx_tag, state, steps, x, x_row, w, w_row, panel):
    """Add the products of 32 * ``steps`` inputs of one tile of rows and four panels.

    A panel has rows of sixteen pairs of inputs, ``w_row`` bytes apart; panels are ``panel`` apart.
    """
    for _ in range(steps):
        tiles.load(amx_tag, state, 4, x, x_row)
        tiles.load(amx_tag, state, 5, w, w_row)
        tiles.multiply(amx_tag, state, 0, 4, 5)
        tiles.load(amx_tag, state, 6, w + panel, w_row)
        tiles.multiply(amx_tag, state, 1, 4, 6)
        tiles.load(amx_tag, state, 7, w + 2 * panel, w_row)
        tiles.multiply(amx_tag, state, 2, 4, 7)
        tiles.load(amx_tag, state, 5, w + 3 * panel, w_row)
        tiles.multiply(amx_tag, state, 3, 4, 5)
        x += tiles.ROW_BYTES
        w += tiles.ROWS * w_row


@njit
def store_one_tile(amx_tag, state, out, out_row):
    """Store the sums of a tile of rows for four panels, side by side."""
    tiles.store(amx_tag, state, 0, out, out_row)
    tiles.store(amx_tag, state, 1, out + PANEL_BYTES, out_row)
    tiles.store(amx_tag, state, 2, out + 2 * PANEL_BYTES, out_row)
    tiles.store(amx_tag, state, 3, out + 3 * PANEL_BYTES, out_row)


@njit
def add_two_tiles(amx_tag, state, steps, x, second, x_row, w, w_row, panel):
    """The same for two tiles of rows and two panels: each tile is loaded once for two products."""
    for _ in range(steps):
        tiles.load(amx_tag, state, 4, x, x_row)
        tiles.load(amx_tag, state, 6, w, w_row)
        tiles.multiply(amx_tag, state, 0, 4, 6)
        tiles.load(amx_tag, state, 7, w + panel, w_row)
        tiles.multiply(amx_tag, state, 1, 4, 7)
        tiles.load(amx_tag, state, 5, second, x_row)
        tiles.multiply(amx_tag, state, 2, 5, 6)
        tiles.multiply(amx_tag, state, 3, 5, 7)
        x += tiles.ROW_BYTES
        second += tiles.ROW_BYTES
        w += tiles.ROWS * w_row


@njit
def store_two_tiles(amx_tag, state, out, second, out_row):
    """Store the sums of two tiles of rows for two panels, side by side."""
    tiles.store(amx_tag, state, 0, out, out_row)
    tiles.store(amx_tag, state, 1, out + PANEL_BYTES, out_row)
    tiles.store(amx_tag, state, 2, second, out_row)
    tiles.store(amx_tag, state, 3, second + PANEL_BYTES, out_row)
