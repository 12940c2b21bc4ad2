"""Allocates zeroed memory for pools."""

import math
import mmap
from collections.abc import Sequence

import torch


def zeroed(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on CPUs the system zeroes each page when it is touched first.

    ``torch.zeros`` would write all pages, 0.7 s for a GB, and delay the start. The worker touches
    them later, while it is idle (see ``prefault``).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
