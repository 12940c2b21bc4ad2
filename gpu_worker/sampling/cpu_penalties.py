"""Penalties on CPUs: one compiled pass over each row's counts, most of which are zero."""

import numba
import numpy as np
import numpy.typing as npt

from gpu_worker.batch.rows import Indices


def penalize(
    logits: npt.NDArray[np.float32],  # [R, V], changed in place
    places: Indices,  # [P] rows of the logits
    counts: npt.NDArray[np.int32],  # [C, V], see ``Penalties``
    rows: Indices,  # [P] rows of the counts
    penalties: npt.NDArray[np.float32],  # [P, 3, 1] repetition, frequency, presence
) -> None:
    """Change the logits of tokens in the prompt or the output."""
    _penalize_rows(logits, places, counts, rows, penalties)


def warm_up() -> None:
    """Compile now, or load from numba's cache, so that the first step need not wait."""
    place = np.zeros(1, np.int64)
    logits, counts = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.int32)
    penalize(logits, place, counts, place, np.ones((1, 3, 1), np.float32))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _penalize_rows(logits, places, counts, rows, penalties):  # type: ignore[no-untyped-def]
    for index in range(len(places)):
        line, seen = logits[places[index]], counts[rows[index]]
        repetition = penalties[index, 0, 0]
        frequency, presence = penalties[index, 1, 0], penalties[index, 2, 0]
        for token in range(len(line)):
            count = seen[token]
            if count == 0:
                continue
            value = line[token]
            value = value / repetition if value > 0 else value * repetition
            generated = count >> 1
            if generated > 0:
                value = (value - frequency * np.float32(generated)) - presence
            line[token] = value
