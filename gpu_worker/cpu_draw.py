"""Choosing tokens on CPUs: one pass over each row's logits, compiled.

The same filters and the same noise as in ``torch_draw``, without a float copy of the vocabulary per
operation. Rows are independent of each other, so the batch does not enter.
"""

import math

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]

# Tokens are sorted into bins by their distance to the likeliest; what lies farther than the last
# bin has less than e^-32 of its probability.
_NUM_BINS = 2048
_BINS_PER_UNIT = _NUM_BINS / 32.0
# Tokens whose largest is found by vectors, before anyone looks where it is.
_RUN = 512
# Above the magnitudes of all numbers, infinity included.
_NO_NUMBER = 0x7F80


def likeliest(
    logits: Bits,  # [R, V] of bfloat16
) -> tuple[Ints, Floats]:
    """Where each row has its largest first, and that value, both [R]; a NaN is the largest."""
    tokens = np.empty(len(logits), np.int64)
    best = np.empty(len(logits), np.uint32)
    _likeliest_rows(logits, tokens, best)
    return tokens, best.view(np.float32)


def draw(
    logits: Floats,  # [D, V]
    temperature: Floats,  # [D], above 0
    top_k: Ints,  # [D], 0 keeps all
    top_p: Floats,  # [D], 1 keeps all
    min_p: Floats,  # [D], 0 keeps all
    keys: npt.NDArray[np.int32],  # [2, D]
) -> Ints:
    """A token for each row, [D]."""
    tokens = np.empty(len(logits), np.int64)
    _draw_rows(logits, temperature, top_k, top_p, min_p, keys.view(np.uint32), tokens)
    return tokens


def warm_up() -> None:
    """Compile now, or load from numba's cache, what the first draw would wait for."""
    one, zero = np.ones(1, np.float32), np.zeros(1, np.int64)
    draw(np.zeros((1, 8), np.float32), one, zero, one, one, np.zeros((2, 1), np.int32))
    likeliest(np.zeros((1, 8), np.uint16))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _likeliest_rows(logits, tokens, best):  # type: ignore[no-untyped-def]
    size = logits.shape[1]
    for row in range(len(logits)):
        line = logits[row]
        top, found = np.int16(-0x8000), 0
        for first in range(0, size, _RUN):
            run = line[first : first + _RUN]
            largest = np.int16(-0x8000)
            for place in range(len(run)):
                largest = max(largest, _rank_of(run[place]))
            if largest > top:
                top, found = largest, first
        while _rank_of(line[found]) != top:
            found += 1
        tokens[row], best[row] = found, np.uint32(line[found]) << np.uint32(16)


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _rank_of(bits):  # type: ignore[no-untyped-def]
    """An integer that is ordered as the bfloat16 is; zeros are equal, and NaNs the largest.

    Sixteen bits all along, so that a vector holds as many as can be.
    """
    signed = np.int16(bits)
    magnitude = np.int16(signed & np.int16(0x7FFF))
    sign = np.int16(signed >> np.int16(15))  # 0 or -1
    rank = np.int16((magnitude ^ sign) - sign)
    return np.int16(0x7FFF) if magnitude > np.int16(_NO_NUMBER) else rank


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _draw_rows(logits, temperature, top_k, top_p, min_p, keys, tokens):  # type: ignore[no-untyped-def]
    scaled = np.empty(logits.shape[1], np.float32)
    for row in range(logits.shape[0]):
        best = np.argmax(logits[row])
        # Division, as in torch: a product with the inverse would round differently.
        for token in range(len(scaled)):
            scaled[token] = logits[row, token] / temperature[row]
        threshold = np.float32(-np.inf)
        if min_p[row] > 0:
            threshold = scaled[best] + np.float32(math.log(min_p[row]))
        if top_k[row] > 0 or top_p[row] < 1:
            threshold = max(threshold, _ranked_threshold(scaled, best, top_k[row], top_p[row]))
        tokens[row] = _gumbel_argmax(scaled, best, threshold, keys[0, row], keys[1, row])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel_argmax(scaled, first, threshold, key_0, key_1):  # type: ignore[no-untyped-def]
    """Argmax of scaled [V] plus noise over the entries that reach the threshold."""
    winner = first  # visited first: whoever comes after it must beat a high score
    record = scaled[first] + _gumbel(_uniform(first, key_0, key_1))
    for token in range(len(scaled)):
        if scaled[token] < threshold:
            continue
        # The noise beats the lead only if the uniform number is below exp(-lead), which is at most
        # 1 / (1 + lead + lead^2 / 2). Most are not, and need no logarithms. The margin covers
        # the rounding of all that.
        lead = max(record - scaled[token], np.float32(0))
        if lead > 23.0:
            continue
        uniform = _uniform(token, key_0, key_1)
        bound = np.float32(1) + lead * (np.float32(1) + np.float32(0.5) * lead)
        if uniform * bound < np.float32(1.001):
            score = scaled[token] + _gumbel(uniform)
            if score > record or (score == record and token < winner):
                winner, record = token, score
    return winner


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _uniform(token, key_0, key_1):  # type: ignore[no-untyped-def]
    """The number in (0, 1) at a token's place; see ``noise.gumbel_noise``."""
    bits = np.uint32(np.uint32(token) * np.uint32(0x9E3779B1)) ^ key_0
    bits = _mix(_mix(bits) ^ key_1)
    # The sign bit is flipped, as torch's signed numbers are moved up by half their range.
    number = np.float32(np.int32(bits)) + np.float32(2.0**31 + 0.5)
    return min(max(number * np.float32(2.0**-32), np.float32(2.0**-33)), np.float32(1 - 2.0**-24))


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _mix(bits):  # type: ignore[no-untyped-def]
    """Murmur3's finalizer."""
    bits = np.uint32(bits ^ (bits >> np.uint32(16)))
    bits = np.uint32(bits * np.uint32(0x85EBCA6B))
    bits = np.uint32(bits ^ (bits >> np.uint32(13)))
    bits = np.uint32(bits * np.uint32(0xC2B2AE35))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel(uniform):  # type: ignore[no-untyped-def]
    return np.float32(-math.log(-math.log1p(-uniform)))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _ranked_threshold(scaled, best, top_k, top_p):  # type: ignore[no-untyped-def]
    """Lowest value that top-k and then top-p keep."""
    counts = np.zeros(_NUM_BINS, np.int64)
    masses = np.zeros(_NUM_BINS, np.float64)
    top = scaled[best]
    for token in range(len(scaled)):
        distance = top - scaled[token]
        index = _bin(distance)
        counts[index] += 1
        masses[index] += math.exp(-distance)
    threshold = np.float32(-np.inf)
    total = masses.sum()
    if 0 < top_k < len(scaled):
        threshold, total = _kth_value(scaled, top, counts, masses, top_k)
    if top_p < 1:
        threshold = max(threshold, _nucleus_value(scaled, top, masses, top_p * total))
    return threshold


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _kth_value(scaled, top, counts, masses, top_k):  # type: ignore[no-untyped-def]
    """The k-th largest value, and the mass of the k largest relative to the largest."""
    index, before, mass = 0, 0, 0.0
    while before + counts[index] < top_k:
        before += counts[index]
        mass += masses[index]
        index += 1
    values = _values_of_bin(scaled, top, index)
    for rank in range(top_k - before):
        mass += math.exp(values[rank] - top)
    return values[top_k - before - 1], mass


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _nucleus_value(scaled, top, masses, wanted):  # type: ignore[no-untyped-def]
    """The value that ends the smallest set of largest ones with the wanted mass."""
    index, mass = 0, 0.0
    while index < _NUM_BINS - 1 and mass + masses[index] < wanted:
        mass += masses[index]
        index += 1
    values = _values_of_bin(scaled, top, index)
    if len(values) == 0:
        return np.float32(-np.inf)  # only rounding kept the sum below what is wanted
    for rank in range(len(values)):
        mass += math.exp(values[rank] - top)
        if mass >= wanted:
            return values[rank]
    return values[len(values) - 1]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _values_of_bin(scaled, top, index):  # type: ignore[no-untyped-def]
    """What lies in one bin, descending."""
    found = np.empty(len(scaled), np.float32)
    size = 0
    for token in range(len(scaled)):
        if _bin(top - scaled[token]) == index:
            found[size] = scaled[token]
            size += 1
    return -np.sort(-found[:size])


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _bin(distance):  # type: ignore[no-untyped-def]
    place = distance * np.float32(_BINS_PER_UNIT)
    return int(place) if place < _NUM_BINS - 1 else _NUM_BINS - 1
