"""The Triton kernel that chooses tokens: the argmax of a row, or a sample of what filters keep.

It is the same token that ``kernels.cpu.sampling.sample_kernel`` samples. A row is read several
times and never sorted: the values that end a top-k and a nucleus are found by dividing an interval.
"""

import triton
import triton.language as tl

_NOTHING = tl.constexpr(float("-inf"))
_LAST_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_random"])
def sample_kernel(  # type: ignore[no-untyped-def]
    logits,  # [R, V], rows contiguous
    places,  # [R] int32, place of the row's parameters; negative: its argmax
    temperature,  # [N] float32, above 0
    top_k,  # [N] int64, 0 keeps all
    top_p,  # [N] float32, 1 keeps all
    log_min_p,  # [N] float32, -inf keeps all
    keys,  # [2, N] int32 of the Gumbel noise
    tokens,  # [R] int64
    broken,  # [R] int8: the logits are not finite, and the token is a stopgap
    row_stride,
    num_random,  # N
    VOCAB_SIZE: tl.constexpr,  # V
    TILE: tl.constexpr,
):
    """Choose the token of one row. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    largest, token, is_bad = _argmax(start, VOCAB_SIZE, TILE)
    is_broken = is_bad | (largest == _NOTHING)
    tl.store(broken + row, is_broken.to(tl.int8))
    place = tl.load(places + row)
    if (place >= 0) & (is_broken == 0):
        heat = tl.load(temperature + place)
        top = tl.div_rn(largest, heat)
        threshold = top + tl.load(log_min_p + place)
        k, p = tl.load(top_k + place), tl.load(top_p + place)
        if (k > 0) | (p < 1.0):
            ranked = _ranked_threshold(start, VOCAB_SIZE, heat, top, k, p, TILE)
            threshold = tl.maximum(threshold, ranked)
        key, more_key = tl.load(keys + place), tl.load(keys + num_random + place)
        token = _gumbel_argmax(start, VOCAB_SIZE, heat, threshold, key, more_key, TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _argmax(start, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit below infinity, its first token, and whether a NaN or infinity is there."""
    lane = tl.arange(0, TILE)  # [TILE]
    best = tl.full([TILE], _NOTHING, tl.float32)
    best_token = lane
    bad = tl.zeros([TILE], tl.int32)
    for first in range(0, VOCAB_SIZE, TILE):
        token = first + lane
        logit = tl.load(start + token, mask=token < VOCAB_SIZE, other=_NOTHING).to(tl.float32)
        is_number = logit < float("inf")  # false for a NaN
        bad |= (is_number == 0).to(tl.int32)
        better = is_number & (logit > best)
        best = tl.where(better, logit, best)
        best_token = tl.where(better, token, best_token)
    largest = tl.max(best, 0)
    found = tl.min(tl.where(best == largest, best_token, _LAST_TOKEN), 0)
    return largest, tl.minimum(found, VOCAB_SIZE - 1), tl.max(bad, 0) > 0


@triton.jit
def _scaled(start, token, VOCAB_SIZE: tl.constexpr, heat):  # type: ignore[no-untyped-def]
    """Logits divided by the temperature, in float32; -inf beyond the vocabulary."""
    logit = tl.load(start + token, mask=token < VOCAB_SIZE, other=_NOTHING).to(tl.float32)
    return tl.div_rn(logit, heat)


@triton.jit
def _ranked_threshold(  # type: ignore[no-untyped-def]
    start, VOCAB_SIZE: tl.constexpr, heat, top, k, p, TILE: tl.constexpr
):
    """The lowest value that top-k and then top-p keep."""
    lane = tl.arange(0, TILE)  # [TILE]
    masses = tl.zeros([TILE], tl.float32)
    for first in range(0, VOCAB_SIZE, TILE):
        masses += tl.exp(_scaled(start, first + lane, VOCAB_SIZE, heat) - top)
    total = tl.sum(masses.to(tl.float64), 0)
    threshold = top * 0.0 + _NOTHING
    if (k > 0) & (k < VOCAB_SIZE):
        lowest, found, above, mass, mass_above = _divide(
            start, VOCAB_SIZE, heat, top, k, 0.0 * total, total, TILE
        )
        threshold = lowest
        # Of equal values at the end, only as many count as there is room for.
        ties = mass_above + (k - above).to(tl.float64) * tl.exp(lowest - top).to(tl.float64)
        total = tl.where(found == k, mass, ties)
    if p < 1.0:
        wanted = p.to(tl.float64) * total
        lowest, found, above, mass, mass_above = _divide(
            start, VOCAB_SIZE, heat, top, 0 * k, wanted, total, TILE
        )
        threshold = tl.maximum(threshold, lowest)
    return threshold


@triton.jit
def _divide(  # type: ignore[no-untyped-def]
    start, VOCAB_SIZE: tl.constexpr, heat, top, k, wanted, total, TILE: tl.constexpr
):
    """The largest value that at least k values reach (k > 0), or the wanted mass (k = 0).

    The interval of its order, a 32-bit number, is divided by four with each reading of the row,
    until nothing is left between its ends that could make a difference.

    Returns:
        The value; how many reach it, and how many exceed the interval; the mass of both.
    """
    lane = tl.arange(0, TILE)  # [TILE]
    low = _order(top * 0.0 + _NOTHING).to(tl.int64)
    high = _order(top).to(tl.int64) + 1
    found, above = VOCAB_SIZE + 0 * k, 0 * k  # int64
    mass, mass_above = total, 0.0 * total
    while (high - low > 1) & (found - above > 1) & (found != k):
        step = high - low
        first_cut = low + tl.maximum(step // 4, 1)
        second_cut = low + tl.maximum(step // 2, 1)
        third_cut = low + tl.maximum(3 * step // 4, 1)
        first_value, second_value = _value(first_cut), _value(second_cut)
        third_value = _value(third_cut)
        first_count = tl.zeros([TILE], tl.int32)
        second_count, third_count = first_count, first_count
        first_mass = tl.zeros([TILE], tl.float32)
        second_mass, third_mass = first_mass, first_mass
        for first in range(0, VOCAB_SIZE, TILE):
            value = _scaled(start, first + lane, VOCAB_SIZE, heat)  # [TILE]
            weight = tl.exp(value - top)
            reached = value >= first_value
            first_count += reached.to(tl.int32)
            first_mass += tl.where(reached, weight, 0.0)
            reached = value >= second_value
            second_count += reached.to(tl.int32)
            second_mass += tl.where(reached, weight, 0.0)
            reached = value >= third_value
            third_count += reached.to(tl.int32)
            third_mass += tl.where(reached, weight, 0.0)
        # From the highest cut to the lowest: a cut that enough values reach is the new low end.
        low, high, found, above, mass, mass_above = _narrowed(
            low, high, found, above, mass, mass_above, third_cut, third_count, third_mass, k, wanted
        )
        low, high, found, above, mass, mass_above = _narrowed(
            low, high, found, above, mass, mass_above, second_cut, second_count, second_mass, k,
            wanted,
        )  # fmt: skip
        low, high, found, above, mass, mass_above = _narrowed(
            low, high, found, above, mass, mass_above, first_cut, first_count, first_mass, k, wanted
        )
    return _value(low), found, above, mass, mass_above


@triton.jit
def _narrowed(low, high, found, above, mass, mass_above, cut, counts, masses, k, wanted):
    """The interval and what its ends count, after one cut; a cut outside of it changes nothing."""
    count = tl.sum(counts, 0).to(tl.int64)
    weight = tl.sum(masses.to(tl.float64), 0)
    is_inside = (cut > low) & (cut < high)
    enough = ((k > 0) & (count >= k)) | ((k == 0) & (weight >= wanted))
    up, down = is_inside & enough, is_inside & (enough == 0)
    return (
        tl.where(up, cut, low),
        tl.where(down, cut, high),
        tl.where(up, count, found),
        tl.where(down, count, above),
        tl.where(up, weight, mass),
        tl.where(down, weight, mass_above),
    )


@triton.jit
def _order(value):
    """A number [int32] that is ordered as float32 values are."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The float32 value of an order [int64]."""
    bits = order.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _gumbel_argmax(  # type: ignore[no-untyped-def]
    start, VOCAB_SIZE: tl.constexpr, heat, threshold, key, more_key, TILE: tl.constexpr
):
    """The first token with the highest score among those that reach the threshold."""
    lane = tl.arange(0, TILE)  # [TILE]
    best = tl.full([TILE], _NOTHING, tl.float32)
    best_token = tl.full([TILE], _LAST_TOKEN, tl.int32)
    for first in range(0, VOCAB_SIZE, TILE):
        token = first + lane
        value = _scaled(start, token, VOCAB_SIZE, heat)
        score = tl.where(value >= threshold, value + _gumbel(token, key, more_key), _NOTHING)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    return tl.min(tl.where(best == tl.max(best, 0), best_token, _LAST_TOKEN), 0)


@triton.jit
def _gumbel(token, key, more_key):
    """The Gumbel noise of tokens [n], see ``gpu_worker.sampling.gumbel``."""
    bits = token.to(tl.uint32, bitcast=True) * 0x9E3779B1
    bits = _mix(bits ^ key.to(tl.uint32, bitcast=True))
    bits = _mix(bits ^ more_key.to(tl.uint32, bitcast=True))
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 2147483648.0) * (2.0**-32)
    uniform = tl.minimum(tl.maximum(uniform, 2.0**-33), 1.0 - 2.0**-24)
    # log1p(-u): the logarithm of the rounded 1 - u, corrected for that rounding (Kahan).
    rest = 1.0 - uniform
    rounded = tl.where(rest == 1.0, 0.5, rest)
    corrected = tl.log(rounded) * tl.div_rn(uniform, rounded - 1.0)
    exponential = tl.where(rest == 1.0, uniform, corrected)
    return -tl.log(exponential)


@triton.jit
def _mix(x):
    """Murmur3's finalizer on uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x
