"""Keys of the Gumbel noise for sampling, a pure function of (seed, choice, position, token id).

It depends neither on the batch, nor on the order of steps, nor on a device's random state. The
kernels make it from a row's two keys: a token id, spread by a multiplication with 0x9E3779B1, goes
through murmur3's finalizer after an exclusive or with each key; the signed result, moved up by 2^31
and scaled by 2^-32, is a uniform number u within [2^-33, 1 - 2^-24]; the noise is
-log(-log1p(-u)).
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(
    seeds: npt.NDArray[np.uint64],  # [R]
    choices: npt.NDArray[np.int64],  # [R]
    positions: npt.NDArray[np.int64],  # [R]
) -> npt.NDArray[np.int32]:
    """Two 32-bit keys for each row, [2, R]."""
    key = _splitmix(seeds + _GOLDEN)
    key = _splitmix((key ^ choices.astype(np.uint64)) + _GOLDEN)
    key = _splitmix((key ^ positions.astype(np.uint64)) + _GOLDEN)
    return (
        np.stack([key >> np.uint64(32), key & np.uint64(0xFFFFFFFF)])
        .astype(np.uint32)
        .view(np.int32)
    )


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
