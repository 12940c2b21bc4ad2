"""Where logits in bfloat16 are largest, on CPUs: one compiled pass over each row."""

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]

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


def warm_up() -> None:
    """Compile now, or load from numba's cache, what the first step would wait for."""
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
