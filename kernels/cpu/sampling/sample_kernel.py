"""The CPU kernel that samples tokens: rows of logits, claimed by threads.

Gumbel-max: the argmax of filtered logits plus Gumbel noise is a sample from their softmax. Rows are
independent of each other, so a sample does not depend on the batch.
"""

import math

import numpy as np
from numba import carray, njit

from kernels.cpu.runtime.kernel_arguments import NEXT_TASK, NEXT_THREAD
from kernels.cpu.runtime.memory import (
    claim,
    field,
    item_bytes,
    load_element,
    load_i32,
    load_i64,
    store_element,
    store_i64,
)
from kernels.cpu.runtime.simd import float32_tag
from kernels.cpu.sampling import sample_arguments as fields
from kernels.cpu.sampling.sample_ir import (
    in_bin,
    may_win,
    pointer,
    scale_chunk,
    uniform_of,
    weigh_chunk,
)

_LANES = 16
_TEMPERATURE = fields.place_of("temperature")
_TOP_K = fields.place_of("top_k")
_TOP_P = fields.place_of("top_p")
_MIN_P = fields.place_of("min_p")


@njit
def sample_tasks(arguments, tag):
    """Claim rows until none is left; ``tag`` types the logits."""
    num_sampled = field(arguments, fields.NUM_SAMPLED)
    size = field(arguments, fields.VOCAB_SIZE)
    padded = (size + _LANES - 1) // _LANES * _LANES
    thread = claim(arguments + 8 * NEXT_THREAD)
    scaled = field(arguments, fields.SCRATCH) + thread * field(arguments, fields.SCRATCH_BYTES)
    while True:
        index = claim(arguments + 8 * NEXT_TASK)
        if index >= num_sampled:
            return
        row = load_i64(field(arguments, fields.ROWS) + 8 * index)
        token_at = field(arguments, fields.TOKENS) + 8 * row
        first = load_i64(token_at)
        temperature = _float_at(arguments, _TEMPERATURE, index)
        logits = field(arguments, fields.LOGITS) + row * field(arguments, fields.LOGITS_ROW)
        _scale(tag, logits, temperature, size, padded, scaled)
        top = load_element(float32_tag, scaled + 4 * first)
        threshold = np.float32(-np.inf)
        min_p, top_p = _float_at(arguments, _MIN_P, index), _float_at(arguments, _TOP_P, index)
        top_k = load_i64(field(arguments, _TOP_K) + 8 * index)
        if min_p > 0:
            threshold = np.float32(top + np.float32(math.log(min_p)))
        if top_k > 0 or top_p < 1:
            ranked = _ranked_threshold(scaled, padded, size, top, top_k, top_p)
            threshold = max(threshold, ranked)
        key = _key_at(field(arguments, fields.KEYS), index)
        more_key = _key_at(field(arguments, fields.MORE_KEYS), index)
        store_i64(token_at, _gumbel_argmax(scaled, padded, first, threshold, key, more_key))


@njit
def _float_at(arguments, place, index):
    return load_element(float32_tag, field(arguments, place) + 4 * index)


@njit
def _key_at(keys, index):
    return np.uint32(load_i32(keys + 4 * index))


@njit
def _scale(tag, logits, temperature, size, padded, scaled):
    """Divide logits by the temperature; fill the last vector up with what is never sampled."""
    whole = size // _LANES * _LANES
    for token in range(0, whole, _LANES):
        scale_chunk(tag, logits + token * item_bytes(tag), temperature, scaled + 4 * token)
    for token in range(whole, size):
        logit = load_element(tag, logits + token * item_bytes(tag))
        store_element(float32_tag, scaled + 4 * token, np.float32(logit / temperature))
    for token in range(size, padded):
        store_element(float32_tag, scaled + 4 * token, np.float32(-np.inf))


@njit
def _gumbel_argmax(scaled, padded, first, threshold, key, more_key):
    """Argmax of scaled logits plus noise, over the tokens that reach the threshold."""
    # The most likely token first: the score that others must beat is high from the beginning.
    winner = first
    record = load_element(float32_tag, scaled + 4 * first)
    record += _gumbel(first, key, more_key)
    for chunk in range(0, padded, _LANES):
        found = may_win(scaled + 4 * chunk, chunk, record, threshold, key, more_key)
        token = chunk
        while found != 0:
            if found & 1:
                score = load_element(float32_tag, scaled + 4 * token)
                score += _gumbel(token, key, more_key)
                if score > record or (score == record and token < winner):
                    winner, record = token, score
            found >>= 1
            token += 1
    return winner


@njit
def _gumbel(token, key, more_key):
    """The Gumbel noise of a token, see ``gpu_worker.sampling.gumbel``."""
    return np.float32(-math.log(-math.log1p(-uniform_of(token, key, more_key))))


@njit
def _ranked_threshold(scaled, padded, size, top, top_k, top_p):
    """Lowest value that top-k and then top-p keep."""
    values = carray(pointer(scaled + 4 * padded), (padded,), np.float32)
    counts_at = scaled + 8 * padded
    counts = carray(pointer(counts_at), (fields.NUM_BINS,), np.int64)
    masses = carray(pointer(counts_at + 8 * fields.NUM_BINS), (fields.NUM_BINS,), np.float64)
    spare = counts_at + 16 * fields.NUM_BINS
    counts[:] = 0
    masses[:] = 0
    for chunk in range(0, padded, _LANES):
        weigh_chunk(scaled + 4 * chunk, top, spare, spare + 4 * _LANES)
        for lane in range(min(_LANES, size - chunk)):
            index = load_i32(spare + 4 * lane)
            counts[index] += 1
            masses[index] += load_element(float32_tag, spare + 4 * (_LANES + lane))
    threshold = np.float32(-np.inf)
    total = masses.sum()
    if 0 < top_k < size:
        threshold, total = _kth_value(scaled, padded, top, counts, masses, values, top_k)
    if top_p < 1:
        nucleus = _nucleus_value(scaled, padded, top, masses, values, top_p * total)
        threshold = max(threshold, nucleus)
    return threshold


@njit
def _kth_value(scaled, padded, top, counts, masses, values, top_k):
    """The k-th largest value, and the mass of the k largest relative to the largest."""
    index, before, mass = 0, 0, 0.0
    while before + counts[index] < top_k:
        before += counts[index]
        mass += masses[index]
        index += 1
    num_values = _values_of_bin(scaled, padded, top, index, values)
    for rank in range(top_k - before):
        mass += math.exp(values[num_values - 1 - rank] - top)
    return values[num_values - top_k + before], mass


@njit
def _nucleus_value(scaled, padded, top, masses, values, wanted):
    """The value that ends the smallest set of largest ones with the wanted mass."""
    index, mass = 0, 0.0
    while index < fields.NUM_BINS - 1 and mass + masses[index] < wanted:
        mass += masses[index]
        index += 1
    num_values = _values_of_bin(scaled, padded, top, index, values)
    if num_values == 0:
        return np.float32(-np.inf)  # only rounding kept the sum below what is wanted
    for rank in range(num_values):
        value = values[num_values - 1 - rank]
        mass += math.exp(value - top)
        if mass >= wanted:
            return value
    return values[0]


@njit
def _values_of_bin(scaled, padded, top, index, values):
    """Copy the values of one bin to ``values``, ascending; returns their number."""
    size = 0
    for chunk in range(0, padded, _LANES):
        found = in_bin(scaled + 4 * chunk, top, index)
        at = scaled + 4 * chunk
        while found != 0:
            if found & 1:
                values[size] = load_element(float32_tag, at)
                size += 1
            found >>= 1
            at += 4
    values[:size].sort()
    return size
