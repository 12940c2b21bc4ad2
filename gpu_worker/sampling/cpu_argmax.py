"""Argmax of logits in bfloat16 on CPUs: one compiled pass over each row."""

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint16]

# Tokens whose maximum is computed by vectors, without its index.
_RUN = 512
# Greater magnitudes are NaNs.
_INFINITY = 0x7F80


def argmax(
    logits: Bits,  # [R, V] of bfloat16
) -> tuple[Ints, Floats]:
    """Index of each row's first maximum, and its value, both [R]; a NaN counts as the maximum."""
    tokens = np.empty(len(logits), np.int64)
    values = np.empty(len(logits), np.uint32)
    _argmax_rows(logits, tokens, values)
    return tokens, values.view(np.float32)


def warm_up() -> None:
    """Compile now, or load from numba's cache, so that the first step need not wait."""
    argmax(np.zeros((1, 8), np.uint16))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _argmax_rows(logits, tokens, values):  # type: ignore[no-untyped-def]
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
        tokens[row], values[row] = found, np.uint32(line[found]) << np.uint32(16)


@numba.njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator, unused-ignore]
def _rank_of(bits):  # type: ignore[no-untyped-def]
    """An integer with the order of the bfloat16; zeros are equal, and NaNs the largest.

    It has sixteen bits throughout, so that vectors hold as many as possible.
    """
    signed = np.int16(bits)
    magnitude = np.int16(signed & np.int16(0x7FFF))
    sign = np.int16(signed >> np.int16(15))  # 0 or -1
    rank = np.int16((magnitude ^ sign) - sign)
    return np.int16(0x7FFF) if magnitude > np.int16(_INFINITY) else rank
