"""Gumbel noise for sampling, as a pure function of (seed, choice, position, token id).

It depends neither on the batch, nor on the order of steps, nor on a device's random state.
"""

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_STEP = 0x9E3779B1 - 2**32  # odd, spreads neighbouring token ids; as a signed number
# The multipliers of murmur3's finalizer, as signed 32-bit numbers.
_MIX_1 = 0x85EBCA6B - 2**32
_MIX_2 = 0xC2B2AE35 - 2**32


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


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [R, vocab_size] float32 for keys [2, R] int32."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * _TOKEN_STEP
    bits = _mix(ids.unsqueeze(0) ^ keys[0].unsqueeze(1))  # [R, V]
    bits = _mix(bits.bitwise_xor_(keys[1].unsqueeze(1)))
    # Shift to [0, 2**32), and by half a unit more: zero has no logarithm. Small values, which
    # become large noise, stay exact in float32.
    uniform = bits.to(torch.float32).add_(2.0**31 + 0.5).mul_(2.0**-32)
    exponential = uniform.clamp_(2.0**-33, 1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's finalizer on int32, in place; multiplication wraps on all devices."""
    x ^= _shift_right(x, 16)
    x *= _MIX_1
    x ^= _shift_right(x, 13)
    x *= _MIX_2
    x ^= _shift_right(x, 16)
    return x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: an int32 is shifted with copies of its sign, which are masked away."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
