"""The kernels that sampling uses on CPUs, imported with their first use: a GPU needs no numba."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_worker.sampling.cpu_sampling import CpuSampling


@cache
def on_cpu() -> "CpuSampling":
    """The CPU's kernels; the same ones for each caller."""
    from gpu_worker.sampling.cpu_sampling import CpuSampling

    return CpuSampling()
