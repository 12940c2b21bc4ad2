"""The likeliest output of each row of an output layer, without computing all outputs.

Weights w and inputs x are rounded to eight bits, v and y, whose products say between which bounds
an output lies: |w.x - v.y| <= |w - v| |x| + |v| |x - y|, by Cauchy and Schwarz. Only panels that
may have the largest output are then computed, as the layer's own kernel does it, so that the result
is the same, bit for bit. What is read is a little more than half of what the layer's weights take.
"""

import math

from numba import njit, types

from kernels.cpu.linear.linear_arguments import (
    GROUP,
    MOST_BLOCK_ROWS,
    NEXT_TASK,
    NEXT_THREAD,
    PANEL,
    TILE_ROW,
)
from kernels.cpu.linear.linear_ir import ITS_OWN, NOTHING, accumulate, clear_chunk, round_chunk
from kernels.cpu.linear.linear_kernel import clear, multiply
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
    bound_panel,
    code_row,
    largest_of_row,
    reached,
    squares_of_row,
)

# Rows of other sizes are left to the layer: squares of what codes leave of them, or products of
# theirs, may leave the range of float32.
_LEAST_SIZE = 1e-10
_MOST_SIZE = 1e20
# What codes leave is coded once more only if the inverse of the codes' scale is a number.
_LEAST_REST = 1e-30
# By how much float32 may have rounded norms, and an input's rest, in shares of the input.
_ROUNDING = 1e-5
_TINY = 1e-6
# Outputs are rounded to eight bits: what is below the largest by less than this share may be equal.
_SAME = 2.0**-7
UNDECIDED = -1


@njit
def code_tasks(job):
    """Codes and facts of all rows, by one thread: there are few, and they are short."""
    if claim(job + 8 * NEXT_TASK) != 0:
        return
    num_rows, count = field(job, fields.NUM_ROWS), field(job, fields.IN_FEATURES)
    rest = field(job, fields.REST)
    all_rows = num_rows
    for r in range(num_rows):
        x = field(job, fields.INPUT) + r * field(job, fields.INPUT_ROW)
        fact = field(job, fields.FACTS) + r * fields.FACT_BYTES
        _store(fact + fields.FINE_SCALE, 0.0)
        store_i32(fact + fields.FINE_OFFSET, 0)
        store_i32(fact + fields.FINE_ROW, r)
        size = math.sqrt(squares_of_row(bfloat16_tag, x, count)) * (1 + _ROUNDING)
        if not (size >= _LEAST_SIZE and size <= _MOST_SIZE):  # or it is no number
            _store(fact + fields.SIZE, math.nan)
            continue
        _store(fact + fields.SIZE, size)
        _code(job, bfloat16_tag, x, r, fact + fields.SCALE, fact + fields.OFFSET)
        rest_size = _size_of_rest(rest, count, size)
        finer = num_rows <= fields.FINE_ROWS or rest_size > fields.COARSE * size
        if finer and largest_of_row(float32_tag, rest, count) > _LEAST_REST:
            store_i32(fact + fields.FINE_ROW, all_rows)
            at = fact + fields.FINE_SCALE
            _code(job, float32_tag, rest, all_rows, at, fact + fields.FINE_OFFSET)
            rest_size = _size_of_rest(rest, count, size)
            all_rows += 1
        _store(fact + fields.REST_SIZE, rest_size)
    store_i32(field(job, fields.NUM_FINE), all_rows - num_rows)


@njit
def _code(job, tag, x, row, scale_at, offset_at):
    """Codes of a row that is not zero; what they leave is the rest."""
    count = field(job, fields.IN_FEATURES)
    scale = types.float32(largest_of_row(tag, x, count) / 127)
    codes = field(job, fields.ROW_CODES) + row * field(job, fields.ROW_BYTES)
    inverse = types.float32(1 / scale)
    total = code_row(tag, x, inverse, scale, count, codes, field(job, fields.REST))
    _store(scale_at, scale)
    store_i32(offset_at, fields.MOVED * total)


@njit
def _size_of_rest(rest, count, size):
    return math.sqrt(squares_of_row(float32_tag, rest, count)) * (1 + _ROUNDING) + _TINY * size


@njit
def _store(address, number):
    store_element(float32_tag, address, types.float32(number))


@njit
def bound_tasks(job, operand_tag, registers):
    """Claim groups of outputs, and say for each panel what a row's outputs do not exceed."""
    num_rows, in_features = field(job, fields.NUM_ROWS), field(job, fields.IN_FEATURES)
    all_rows = num_rows + load_i32(field(job, fields.NUM_FINE))
    codes, row_bytes = field(job, fields.ROW_CODES), field(job, fields.ROW_BYTES)
    panel_stride = PANEL * in_features
    num_panels = (field(job, fields.OUT_FEATURES) + PANEL - 1) // PANEL
    num_groups = (num_panels + GROUP - 1) // GROUP
    thread = claim(job + 8 * NEXT_THREAD)
    tile = field(job, fields.SCRATCH) + thread * field(job, fields.SCRATCH_BYTES)
    while True:
        group = claim(job + 8 * NEXT_TASK)
        if group >= num_groups:
            return
        w = field(job, fields.CODES) + group * GROUP * panel_stride
        clear(tile, all_rows)
        begin = 0
        while begin < in_features:
            depth = in_features if all_rows <= MOST_BLOCK_ROWS else fields.DEPTH
            depth = min(depth, in_features - begin)
            x_at, w_at = codes + begin, w + begin * PANEL
            begin += depth
            then = w + begin * PANEL
            if begin >= in_features:  # the group behind those that other threads have claimed
                threads = field(job, NEXT_THREAD)
                then = w + min(threads, num_groups - group) * GROUP * panel_stride
            multiply(
                registers, bfloat16_tag, operand_tag, all_rows, x_at, row_bytes, w_at, panel_stride,
                depth // 4, then, tile,
            )  # fmt: skip
        _bound(job, tile, num_rows, all_rows > num_rows, group, num_panels)


@njit
def _bound(job, tile, num_rows, some_fine, group, num_panels):
    facts, bounds_row = field(job, fields.FACTS), field(job, fields.BOUNDS_ROW)
    for panel in range(min(GROUP, num_panels - group * GROUP)):
        at = group * GROUP + panel
        sums, bounds = tile + 4 * PANEL * panel, field(job, fields.BOUNDS) + 4 * at
        scales = field(job, fields.SCALES) + 4 * PANEL * at
        errors = field(job, fields.ERRORS) + 4 * PANEL * at
        norms = field(job, fields.NORMS) + 4 * PANEL * at
        if some_fine:
            bound_panel(1, num_rows, facts, sums, scales, errors, norms, bounds, bounds_row)
        else:
            bound_panel(0, num_rows, facts, sums, scales, errors, norms, bounds, bounds_row)


@njit
def choose_tasks(job, operand_tag):
    """Claim rows, and compute what may be the largest of each."""
    num_panels = (field(job, fields.OUT_FEATURES) + PANEL - 1) // PANEL
    num_rows = field(job, fields.NUM_ROWS)
    while True:
        r = claim(job + 8 * NEXT_TASK)
        if r >= num_rows:
            return
        token, best = _choose(job, operand_tag, r, num_panels)
        store_i64(field(job, fields.TOKENS) + 8 * r, token)
        store_element(float32_tag, field(job, fields.BEST) + 4 * r, best)


@njit
def _choose(job, operand_tag, r, num_panels):
    """The first of the largest outputs, and its value; or that this is UNDECIDED."""
    fact = field(job, fields.FACTS) + r * fields.FACT_BYTES
    bounds = field(job, fields.BOUNDS) + r * field(job, fields.BOUNDS_ROW)
    token, best = UNDECIDED, types.float32(-math.inf)
    size = load_element(float32_tag, fact + fields.SIZE)
    if not size > 0:
        return token, best
    # The panel with the highest bound nearly always has the largest output.
    first, highest = 0, types.float32(-math.inf)
    for panel in range(num_panels):
        bound = load_element(float32_tag, bounds + 4 * panel)
        if bound > highest:
            first, highest = panel, bound
    token, best = _compute(job, operand_tag, r, fact, first, token, best)
    left = field(job, fields.MOST_PANELS)
    for chunk in range(0, num_panels, 16):
        threshold = types.float32(best - abs(best) * types.float32(_SAME))
        found = reached(bounds + 4 * chunk, threshold)
        panel = chunk
        while found != 0:
            if found & 1 and panel != first:
                if left == 0:
                    return UNDECIDED, best
                left -= 1
                token, best = _compute(job, operand_tag, r, fact, panel, token, best)
            found >>= 1
            panel += 1
    return token, best


@njit
def _compute(job, operand_tag, r, fact, panel, token, best):
    """The better of what was found and the outputs of a panel, computed as the layer does."""
    in_features = field(job, fields.IN_FEATURES)
    x_row = field(job, fields.INPUT_ROW)
    x = field(job, fields.INPUT) + r * x_row
    stride = 2 * PANEL * in_features
    w = field(job, fields.WEIGHT) + panel * stride
    sums, outputs = fact + fields.SUMS, fact + fields.OUTPUTS
    clear_chunk(sums)
    accumulate(
        bfloat16_tag, operand_tag, 1, 1, 0, x, x_row, w, stride, in_features // 2, ITS_OWN, NOTHING,
        sums, TILE_ROW,
    )  # fmt: skip
    round_chunk(bfloat16_tag, sums, outputs)
    begin = panel * PANEL
    for n in range(min(PANEL, field(job, fields.OUT_FEATURES) - begin)):
        output = load_element(bfloat16_tag, outputs + 2 * n)
        if output > best or (output == best and begin + n < token):
            token, best = begin + n, output
    return token, best
