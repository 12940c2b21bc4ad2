"""The duration of an all-reduce within one machine: a latency, and bytes over a bandwidth.

The constants for NVLink are fitted to published measurements of H100s: vLLM's
benchmark_device_communicators.py, as its pull requests 24111 (2, 4 and 6 GPUs), 24532 (4) and 42324
(8) print it, for 0.5 and 4 MiB. ``one_shot`` stays within 9 % of all of them, ``ring`` within 25 %.
"""

from dataclasses import dataclass
from typing import Final

# One kernel, in which each GPU reads the values of all others: two barriers and a launch.
_ONE_SHOT_S: Final = 5.5e-6
_PEER_BYTES_PER_S: Final = 350e9  # of 450e9 in the data sheet

# NCCL passes values around twice: once to add them, once to hand out the sums.
_RING_S: Final = 14.5e-6
_RING_HOP_S: Final = 0.75e-6
# NVIDIA's figure for what NCCL's ring reaches on H100 (nccl-tests, issue 212).
_RING_BYTES_PER_S: Final = 370e9


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A way to add a tensor over all GPUs.

    Attributes:
        latency_s: of a sum of nothing.
        byte_s: added for each byte that a GPU gives into the sum.
    """

    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: float) -> float:
        """The duration of the sum of so many bytes."""
        return self.latency_s + num_bytes * self.byte_s


def one_shot(num_gpus: int) -> AllReduce:
    """Each GPU reads the whole tensor of every other one."""
    return AllReduce(_ONE_SHOT_S, (num_gpus - 1) / _PEER_BYTES_PER_S)


def ring(num_gpus: int) -> AllReduce:
    """NCCL's ring: each GPU sends every value twice, except the part that stays."""
    hops = 2 * (num_gpus - 1)
    return AllReduce(_RING_S + hops * _RING_HOP_S, hops / num_gpus / _RING_BYTES_PER_S)
