"""Bans tokens by masks on CPUs: one compiled pass over each row, by one thread."""

import numba
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.grammar.grammars import BITS, Masks

_ALL = 0xFFFFFFFF
_LOWEST = {torch.float16: 0xFC00, torch.bfloat16: 0xFF80}  # bits of minus infinity


def ban(
    logits: torch.Tensor,  # [R, V], changed in place
    rows: npt.NDArray[np.int64],  # [n]
    masks: Masks,  # [n, V / 32]
) -> None:
    """Set the logits of these rows to -inf where the bit of a token is 0."""
    lowest: np.float32 | np.uint16 = np.float32(-np.inf)
    if (bits := _LOWEST.get(logits.dtype)) is not None:
        logits, lowest = logits.view(torch.uint16), np.uint16(bits)
    values = logits.numpy()
    for row, mask in zip(rows.tolist(), masks, strict=True):
        _ban_row(values[row], mask, lowest)


def warm_up() -> None:
    """Compile now, or load from numba's cache, so that the first step need not wait."""
    for dtype in (torch.float32, torch.bfloat16):
        ban(torch.zeros(1, 8, dtype=dtype), np.zeros(1, np.int64), np.zeros((1, 1), np.uint32))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _ban_row(values, mask, lowest):  # type: ignore[no-untyped-def]
    size = len(values)
    for word in range(len(mask)):
        allowed = mask[word]
        if allowed == _ALL:
            continue
        first = word * BITS
        if allowed == 0:
            values[first : first + BITS] = lowest
            continue
        for place in range(min(BITS, size - first)):  # a choice of values makes it vectors
            value = values[first + place]
            values[first + place] = value if (allowed >> place) & 1 else lowest
