"""The CPU kernel of linear layers in bfloat16 by AMX tiles (see ``kernels.cpu.amx.tiles``).

A task is a group of panels of outputs for a chunk of rows, as in ``linear_kernel``. All products of
an output are summed in a tile, 32 inputs after the other. How rows are cut into tiles is in
``kernels.cpu.amx.blocks``.
"""

from numba import njit

from kernels.cpu.amx import blocks, tiles
from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.epilogue import finish
from kernels.cpu.linear.library_blocks import multiply_by_library, rows_by_library
from kernels.cpu.runtime.memory import claim_task, claim_thread, copy_bytes, field, fill_bytes

_INPUT_BYTES = 2
_PANEL_INPUTS_BYTES = fields.PANEL * _INPUT_BYTES  # of one input of all outputs of a panel
# Rows of a chunk that stay in a core's second cache beside the weights of a group.
_CHUNK_BYTES = 1024 * 1024
_FEWEST_CHUNK_ROWS = 2 * tiles.ROWS


@njit
def amx_linear_tasks(args, amx_tag, tag):
    """Compute all groups of outputs; ``tag`` is the type of inputs and outputs."""
    num_rows = field(args, fields.NUM_ROWS)
    in_features = field(args, fields.IN_FEATURES)
    num_groups = field(args, fields.NUM_GROUPS)
    chunk_rows = _CHUNK_BYTES // (in_features * _INPUT_BYTES) // tiles.ROWS * tiles.ROWS
    chunk_rows = min(field(args, fields.CHUNK_ROWS), max(chunk_rows, _FEWEST_CHUNK_ROWS))
    num_chunks = (num_rows + chunk_rows - 1) // chunk_rows
    x_row = field(args, fields.INPUT_ROW)
    state = field(args, fields.SCRATCH) + claim_thread(args) * field(args, fields.SCRATCH_BYTES)
    last_weights = state + tiles.STATE_BYTES  # [GROUP] tiles
    last_inputs = last_weights + fields.GROUP * tiles.TILE_BYTES  # [chunk, 32]
    sums = last_inputs + chunk_rows * tiles.ROW_BYTES  # [chunk, GROUP_OUTPUTS] float32
    prepared = -1
    while True:
        task = claim_task(args)
        if task >= num_groups * num_chunks:
            break
        chunk, group = divmod(task, num_groups)
        x = field(args, fields.INPUT) + chunk * chunk_rows * x_row
        rows = min(chunk_rows, num_rows - chunk * chunk_rows)
        w = field(args, fields.WEIGHT) + group * fields.GROUP * in_features * _PANEL_INPUTS_BYTES
        done = rows_by_library(args, rows)
        if done != 0:
            multiply_by_library(args, done, x, x_row, w, in_features * _PANEL_INPUTS_BYTES, sums)
            x += done * x_row
        left = rows - done
        if left != 0:
            num_tiles, tile_rows = blocks.cut(left)
            if chunk != prepared:
                _copy_last_inputs(x, x_row, left, in_features, last_inputs)
            if chunk != prepared or done != 0:  # the library configures tiles for itself
                tiles.configure(amx_tag, state, tile_rows, min(num_tiles, 2))
            prepared = chunk
            _copy_last_weights(w, in_features, last_weights)
            out = sums + done * fields.TILE_ROW
            if num_tiles == 1:
                _multiply_one_tile(
                    amx_tag, state, x, x_row, w, in_features, last_inputs, last_weights, out
                )
            else:
                _multiply_tiles(
                    amx_tag, state, left, num_tiles, tile_rows, x, x_row, w, in_features,
                    last_inputs, last_weights, out,
                )  # fmt: skip
        finish(args, tag, sums, chunk * chunk_rows, rows, group)
    if prepared >= 0:
        tiles.release(amx_tag, state)


@njit
def _copy_last_inputs(x, x_row, rows, in_features, last_inputs):
    """Copy the sixteen inputs of each row that do not fill a tile, and zeros behind them."""
    left = in_features % tiles.INPUTS * _INPUT_BYTES
    if left != 0:
        fill_bytes(last_inputs, 0, rows * tiles.ROW_BYTES)
        for r in range(rows):
            source = x + r * x_row + in_features * _INPUT_BYTES - left
            copy_bytes(last_inputs + r * tiles.ROW_BYTES, source, left)


@njit
def _copy_last_weights(w, in_features, last_weights):
    """The same for the weights of a group's panels."""
    left = in_features % tiles.INPUTS * _PANEL_INPUTS_BYTES
    if left != 0:
        for panel in range(fields.GROUP):
            target = last_weights + panel * tiles.TILE_BYTES
            behind = w + (panel + 1) * in_features * _PANEL_INPUTS_BYTES
            fill_bytes(target + left, 0, tiles.TILE_BYTES - left)
            copy_bytes(target, behind - left, left)


@njit
def _multiply_one_tile(amx_tag, state, x, x_row, w, in_features, last_inputs, last_weights, sums):
    """Sums [rows, GROUP_OUTPUTS] of the rows of one tile: weights are read once."""
    steps, panel = in_features // tiles.INPUTS, in_features * _PANEL_INPUTS_BYTES
    blocks.clear_sums(amx_tag, state)
    blocks.add_one_tile(amx_tag, state, steps, x, x_row, w, tiles.ROW_BYTES, panel)
    if in_features % tiles.INPUTS != 0:
        blocks.add_one_tile(
            amx_tag, state, 1, last_inputs, tiles.ROW_BYTES, last_weights, tiles.ROW_BYTES,
            tiles.TILE_BYTES,
        )  # fmt: skip
    blocks.store_one_tile(amx_tag, state, sums, fields.TILE_ROW)


@njit
def _multiply_tiles(
    amx_tag, state, rows, num_tiles, tile_rows, x, x_row, w, in_features, last_inputs, last_weights,
    sums,
):  # fmt: skip
    """The same for rows of several tiles, of which two share their loads of weights."""
    steps, panel = in_features // tiles.INPUTS, in_features * _PANEL_INPUTS_BYTES
    for first in range(0, fields.GROUP, 2):
        w_at, last_w = w + first * panel, last_weights + first * tiles.TILE_BYTES
        out = sums + first * blocks.PANEL_BYTES
        for tile in range(0, num_tiles, 2):
            r = tile * tile_rows
            second = min(r + tile_rows, rows - tile_rows)
            blocks.clear_sums(amx_tag, state)
            blocks.add_two_tiles(
                amx_tag, state, steps, x + r * x_row, x + second * x_row, x_row, w_at,
                tiles.ROW_BYTES, panel,
            )  # fmt: skip
            if in_features % tiles.INPUTS != 0:
                blocks.add_two_tiles(
                    amx_tag, state, 1, last_inputs + r * tiles.ROW_BYTES,
                    last_inputs + second * tiles.ROW_BYTES, tiles.ROW_BYTES, last_w,
                    tiles.ROW_BYTES, tiles.TILE_BYTES,
                )  # fmt: skip
            blocks.store_two_tiles(
                amx_tag, state, out + r * fields.TILE_ROW, out + second * fields.TILE_ROW,
                fields.TILE_ROW,
            )  # fmt: skip
