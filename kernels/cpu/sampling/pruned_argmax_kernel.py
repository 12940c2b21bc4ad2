"""The pruned argmax: the largest output of each row of an output layer, without all outputs.

Weights w and inputs x are quantized to eight bits, v and y. Their products bound an output:
|w.x - v.y| <= |w - v| |x| + |v| |x - y|, by Cauchy and Schwarz. Only panels whose bounds reach the
largest output so far are then computed, as the layer's own kernel computes them, so the result is
the same bit for bit. The kernels read little more than half of the bytes of the layer's weights.
"""

import math

from numba import njit, types

from kernels.cpu.linear.linear_arguments import (
    GROUP,
    MOST_BLOCK_ROWS,
    PANEL,
    TILE_ROW,
)
from kernels.cpu.linear.linear_ir import ITS_OWN, NOTHING, accumulate, clear_chunk
from kernels.cpu.linear.linear_kernel import clear, multiply
from kernels.cpu.runtime.kernel_arguments import NEXT_TASK, NEXT_THREAD
from kernels.cpu.runtime.memory import (
    claim,
    field,
    load_element,
    load_i32,
    store_element,
    store_i32,
    store_i64,
)
from kernels.cpu.runtime.simd import bfloat16_tag, float32_tag
from kernels.cpu.sampling import pruned_argmax_arguments as fields
from kernels.cpu.sampling.pruned_argmax_ir import (
    absmax_of_row,
    bound_panel,
    quantize_row,
    reached,
    sum_of_squares,
)

# Rows of other norms are left to the layer: squares of their residuals, or products with them, may
# leave the range of float32.
_MIN_NORM = 1e-10
_MAX_NORM = 1e20
# A residual is quantized only if the inverse of its scale is finite.
_MIN_RESIDUAL = 1e-30
# Rounding of norms in float32, and of an input's residual, as shares of the input.
_ROUNDING = 1e-5
_TINY = 1e-6
UNDECIDED = -1


@njit
def quantize_tasks(arguments):
    """Quantize all rows, by one thread: there are few, and they are short."""
    if claim(arguments + 8 * NEXT_TASK) != 0:
        return
    num_rows, count = field(arguments, fields.NUM_ROWS), field(arguments, fields.IN_FEATURES)
    residual = field(arguments, fields.RESIDUAL)
    num_quantized = num_rows
    for r in range(num_rows):
        x = field(arguments, fields.INPUT) + r * field(arguments, fields.INPUT_ROW)
        stats = field(arguments, fields.STATS) + r * fields.STATS_BYTES
        _store(stats + fields.RESIDUAL_SCALE, 0.0)
        store_i32(stats + fields.RESIDUAL_OFFSET, 0)
        store_i32(stats + fields.RESIDUAL_ROW, r)
        norm = math.sqrt(sum_of_squares(bfloat16_tag, x, count)) * (1 + _ROUNDING)
        if not (norm >= _MIN_NORM and norm <= _MAX_NORM):  # or it is NaN
            _store(stats + fields.NORM, math.nan)
            continue
        _store(stats + fields.NORM, norm)
        _quantize(arguments, bfloat16_tag, x, r, stats + fields.SCALE, stats + fields.OFFSET)
        residual_norm = _residual_norm(residual, count, norm)
        has_residual = num_rows <= fields.FEW_ROWS or residual_norm > fields.LARGE_RESIDUAL * norm
        if has_residual and absmax_of_row(float32_tag, residual, count) > _MIN_RESIDUAL:
            store_i32(stats + fields.RESIDUAL_ROW, num_quantized)
            scale_at, offset_at = stats + fields.RESIDUAL_SCALE, stats + fields.RESIDUAL_OFFSET
            _quantize(arguments, float32_tag, residual, num_quantized, scale_at, offset_at)
            residual_norm = _residual_norm(residual, count, norm)
            num_quantized += 1
        _store(stats + fields.RESIDUAL_NORM, residual_norm)
    store_i32(field(arguments, fields.NUM_RESIDUALS), num_quantized - num_rows)


@njit
def _quantize(arguments, tag, x, row, scale_at, offset_at):
    """Quantize a row that is not zero, and store its residual."""
    count, residual = field(arguments, fields.IN_FEATURES), field(arguments, fields.RESIDUAL)
    scale = types.float32(absmax_of_row(tag, x, count) / 127)
    quantized = field(arguments, fields.QUANTIZED_ROWS) + row * field(arguments, fields.ROW_BYTES)
    inverse = types.float32(1 / scale)
    total = quantize_row(tag, x, inverse, scale, count, quantized, residual)
    _store(scale_at, scale)
    store_i32(offset_at, fields.ZERO_POINT * total)


@njit
def _residual_norm(residual, count, norm):
    return math.sqrt(sum_of_squares(float32_tag, residual, count)) * (1 + _ROUNDING) + _TINY * norm


@njit
def _store(address, number):
    store_element(float32_tag, address, types.float32(number))


@njit
def bound_tasks(arguments, operand_tag, registers):
    """Claim groups of outputs, and store an upper bound of each panel for each row."""
    num_rows, in_features = field(arguments, fields.NUM_ROWS), field(arguments, fields.IN_FEATURES)
    num_quantized = num_rows + load_i32(field(arguments, fields.NUM_RESIDUALS))
    quantized = field(arguments, fields.QUANTIZED_ROWS)
    row_bytes = field(arguments, fields.ROW_BYTES)
    panel_stride = PANEL * in_features
    num_panels = (field(arguments, fields.OUT_FEATURES) + PANEL - 1) // PANEL
    num_groups = (num_panels + GROUP - 1) // GROUP
    thread = claim(arguments + 8 * NEXT_THREAD)
    tile = field(arguments, fields.SCRATCH) + thread * field(arguments, fields.SCRATCH_BYTES)
    while True:
        group = claim(arguments + 8 * NEXT_TASK)
        if group >= num_groups:
            return
        w = field(arguments, fields.QUANTIZED) + group * GROUP * panel_stride
        clear(tile, num_quantized)
        begin = 0
        while begin < in_features:
            depth = in_features if num_quantized <= MOST_BLOCK_ROWS else fields.DEPTH
            depth = min(depth, in_features - begin)
            x_at, w_at = quantized + begin, w + begin * PANEL
            begin += depth
            then = w + begin * PANEL
            if begin >= in_features:  # the group behind those that other threads have claimed
                threads = field(arguments, NEXT_THREAD)
                then = w + min(threads, num_groups - group) * GROUP * panel_stride
            multiply(
                registers, bfloat16_tag, operand_tag, num_quantized, x_at, row_bytes, w_at,
                panel_stride, depth // 4, then, tile,
            )  # fmt: skip
        _bound(arguments, tile, num_rows, num_quantized > num_rows, group, num_panels)


@njit
def _bound(arguments, tile, num_rows, some_residuals, group, num_panels):
    stats, bounds_row = field(arguments, fields.STATS), field(arguments, fields.BOUNDS_ROW)
    for panel in range(min(GROUP, num_panels - group * GROUP)):
        at = group * GROUP + panel
        sums, bounds = tile + 4 * PANEL * panel, field(arguments, fields.BOUNDS) + 4 * at
        scales = field(arguments, fields.SCALES) + 4 * PANEL * at
        errors = field(arguments, fields.ERRORS) + 4 * PANEL * at
        norms = field(arguments, fields.NORMS) + 4 * PANEL * at
        if some_residuals:
            bound_panel(1, num_rows, stats, sums, scales, errors, norms, bounds, bounds_row)
        else:
            bound_panel(0, num_rows, stats, sums, scales, errors, norms, bounds, bounds_row)


@njit
def argmax_tasks(arguments, operand_tag):
    """Claim rows, and compute the panels that may have the largest output of each."""
    num_panels = (field(arguments, fields.OUT_FEATURES) + PANEL - 1) // PANEL
    num_rows = field(arguments, fields.NUM_ROWS)
    while True:
        r = claim(arguments + 8 * NEXT_TASK)
        if r >= num_rows:
            return
        token, value = _argmax(arguments, operand_tag, r, num_panels)
        store_i64(field(arguments, fields.TOKENS) + 8 * r, token)
        store_element(float32_tag, field(arguments, fields.VALUES) + 4 * r, value)


@njit
def _argmax(arguments, operand_tag, r, num_panels):
    """The first of the largest outputs, or UNDECIDED, and the largest value found."""
    stats = field(arguments, fields.STATS) + r * fields.STATS_BYTES
    bounds = field(arguments, fields.BOUNDS) + r * field(arguments, fields.BOUNDS_ROW)
    token, value = UNDECIDED, types.float32(-math.inf)
    norm = load_element(float32_tag, stats + fields.NORM)
    if not norm > 0:
        return token, value
    # The panel with the highest bound nearly always has the largest output.
    first, highest = 0, types.float32(-math.inf)
    for panel in range(num_panels):
        bound = load_element(float32_tag, bounds + 4 * panel)
        if bound > highest:
            first, highest = panel, bound
    token, value = _compute(arguments, operand_tag, r, stats, first, token, value)
    left = field(arguments, fields.MAX_PANELS)
    for chunk in range(0, num_panels, 16):
        found = reached(bounds + 4 * chunk, value)
        panel = chunk
        while found != 0:
            if found & 1 and panel != first:
                if left == 0:
                    return UNDECIDED, value
                left -= 1
                token, value = _compute(arguments, operand_tag, r, stats, panel, token, value)
            found >>= 1
            panel += 1
    return token, value


@njit
def _compute(arguments, operand_tag, r, stats, panel, token, value):
    """The larger of the value so far and the outputs of a panel, computed as the layer does."""
    in_features = field(arguments, fields.IN_FEATURES)
    x_row = field(arguments, fields.INPUT_ROW)
    x = field(arguments, fields.INPUT) + r * x_row
    stride = 2 * PANEL * in_features
    w = field(arguments, fields.WEIGHT) + panel * stride
    sums = stats + fields.SUMS
    clear_chunk(sums)
    accumulate(
        bfloat16_tag, operand_tag, 1, 1, 0, x, x_row, w, stride, in_features // 2, ITS_OWN, NOTHING,
        sums, TILE_ROW,
    )  # fmt: skip
    begin = panel * PANEL
    for n in range(min(PANEL, field(arguments, fields.OUT_FEATURES) - begin)):
        output = load_element(float32_tag, sums + 4 * n)
        if output > value or (output == value and begin + n < token):
            token, value = begin + n, output
    return token, value
