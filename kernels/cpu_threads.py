"""Runs a compiled kernel on torch's own threads.

numba's parallel loops bring a second pool of threads (its OpenMP layer even loads a second
libgomp), and two pools that spin after every region fight over the cores. So the kernels have no
parallel loops: they claim tasks from a shared counter, and here the same function is entered by
every thread of the pool that torch's operators run on, through the entry point that compilers use
for ``#pragma omp parallel``. The pool belongs to the calling thread: attention must be called from
the thread that runs the model, which it is.
"""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ParallelRegion = Callable[[int, int, int, int], None]


def find_parallel_region() -> _ParallelRegion | None:
    """``GOMP_parallel`` of the OpenMP runtime that torch is linked to, or None.

    Looking a symbol up in torch's library searches what that library was linked to, so a second
    runtime in the process is never hit. LLVM's runtime offers the same entry point on Linux.
    """
    for library in sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")):
        try:
            region = ctypes.CDLL(str(library)).GOMP_parallel
        except (AttributeError, OSError):
            continue
        region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        region.restype = None
        return region
    return None


class TeamRunner:
    """Enters a kernel with one thread, or with all of torch's."""

    def __init__(self) -> None:
        self._parallel_region = find_parallel_region()
        if self._parallel_region is None:
            logger.warning("torch's OpenMP runtime is not callable: attention runs on one thread")

    def num_threads(self) -> int:
        """Threads that a parallel run may enter; scratch must be there for each."""
        return torch.get_num_threads() if self._parallel_region is not None else 1

    def run(self, kernel: int, job: int, num_threads: int) -> None:
        """Call the function at address ``kernel`` with ``job`` on each of ``num_threads`` threads.

        Returns when all of them are done.
        """
        if num_threads == 1 or self._parallel_region is None:
            _FUNCTION(kernel)(job)
        else:
            self._parallel_region(kernel, job, num_threads, 0)
