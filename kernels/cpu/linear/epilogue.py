"""What follows when all products of a linear layer's outputs are summed: bias, gate and addend, and
one rounding, or none.
"""

from numba import njit

from kernels.cpu.linear import linear_arguments as fields
from kernels.cpu.linear.linear_ir import add_chunk, round_chunk, silu_gate_chunk
from kernels.cpu.runtime.memory import field, item_bytes, load_element, store_element
from kernels.cpu.runtime.simd import float32_tag


@njit
def finish(args, tag, tile, first, rows, group):
    """Add bias, gate and addend in float32, round, and store in the segment of this group."""
    segment = args + 8 * fields.SEGMENTS
    behind = segment + 8 * fields.SEGMENT_FIELDS
    while field(behind, fields.FIRST_GROUP) <= group:
        segment, behind = behind, behind + 8 * fields.SEGMENT_FIELDS
    column = (group - field(segment, fields.FIRST_GROUP)) * fields.GROUP_OUTPUTS
    out_row = field(segment, fields.OUT_ROW)
    out = field(segment, fields.OUT) + first * out_row
    num_outputs = min(fields.GROUP_OUTPUTS, field(segment, fields.OUT_FEATURES) - column)
    bias = field(segment, fields.BIAS)
    if bias != 0:
        for r in range(rows):
            for n in range(0, fields.GROUP_OUTPUTS, fields.PANEL):
                add_chunk(float32_tag, tile + r * fields.TILE_ROW + 4 * n, bias + 4 * (column + n))
    if field(args, fields.EPILOGUE) == fields.SILU_GATED:
        _finish_gated(tag, tile, rows, out + column // 2 * item_bytes(tag), out_row, num_outputs)
        return
    if field(args, fields.EPILOGUE) == fields.FLOAT32:
        _store(float32_tag, tile, rows, out + 4 * column, out_row, 0, 0, num_outputs)
        return
    addend, addend_row = field(args, fields.ADDEND), field(args, fields.ADDEND_ROW)
    if addend != 0:
        addend += first * addend_row + column * item_bytes(tag)
    _store(
        tag, tile, rows, out + column * item_bytes(tag), out_row, addend, addend_row, num_outputs
    )


@njit
def _store(tag, tile, rows, out, out_row, addend, addend_row, num_outputs):
    """Round sums, with an addend unless its address is zero, and store them."""
    for r in range(rows):
        sums = tile + r * fields.TILE_ROW
        target, source = out + r * out_row, addend + r * addend_row
        n = 0
        while n + fields.PANEL <= num_outputs:
            if addend != 0:
                add_chunk(tag, sums + 4 * n, source + n * item_bytes(tag))
            round_chunk(tag, sums + 4 * n, target + n * item_bytes(tag))
            n += fields.PANEL
        for m in range(n, num_outputs):
            total = load_element(float32_tag, sums + 4 * m)
            if addend != 0:
                total += load_element(tag, source + m * item_bytes(tag))
            store_element(tag, target + m * item_bytes(tag), total)


@njit
def _finish_gated(tag, tile, rows, out, out_row, num_outputs):
    """out = silu(gate) * up: half as many columns as the tile has."""
    for r in range(rows):
        sums = tile + r * fields.TILE_ROW
        for n in range(0, num_outputs, 2 * fields.PANEL):
            gate = sums + 4 * n
            silu_gate_chunk(gate, gate + 4 * fields.PANEL)
            round_chunk(tag, gate, out + r * out_row + n // 2 * item_bytes(tag))
