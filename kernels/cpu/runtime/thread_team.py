"""Runs a kernel on torch's own threads.

numba's parallel loops bring a second pool of threads (its OpenMP layer even loads a second
libgomp), and two pools that spin after every region compete for the cores. So the kernels have no
parallel loops: their threads claim tasks from a shared counter. Here every thread of the pool that
torch's operators run on enters the kernel, through the function that compilers call for
``#pragma omp parallel``. The pool belongs to the calling thread, so attention must be called from
the thread that runs the model.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kernels.cpu.runtime.entry_points import Kernel

logger = logging.getLogger(__name__)

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Functions of an OpenMP runtime.

    Attributes:
        parallel_region: runs a function (its address, an argument, threads, flags) on a team.
        team_size: address of ``int team_size()``, the number of threads in the calling region.
    """

    parallel_region: Callable[[int, int, int, int], None]
    team_size: int


class Capture(Protocol):
    """Takes kernels and their arguments instead of running them."""

    def add(self, kernel: Kernel, address: int) -> None:
        """Store a kernel with the arguments at an address."""


_capture: ContextVar[Capture | None] = ContextVar("_capture", default=None)


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Inside the block, kernels that this thread calls are added to the capture, and do not run."""
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def is_capturing() -> bool:
    """Whether kernels that this thread calls are captured."""
    return _capture.get() is not None


def find_openmp() -> OpenMP | None:
    """The OpenMP runtime that torch is linked to; None: it has none with these functions.

    A symbol that is looked up in torch's library is searched in what that library was linked to,
    so a second runtime in the process is never found. LLVM's runtime has the same functions on
    Linux.
    """
    for path in sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))
            region, team_size = library.GOMP_parallel, library.omp_get_num_threads
        except (AttributeError, OSError):
            continue
        region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        region.restype = None
        return OpenMP(region, _address(team_size))
    return None


def find_sched_yield() -> int:
    """Address of ``int sched_yield()``, which yields the core; 0: there is no such function."""
    try:
        return _address(ctypes.CDLL(None).sched_yield)
    except (AttributeError, OSError, TypeError):
        return 0


def find_clock_gettime() -> int:
    """Address of ``int clock_gettime(int, int64 times[2])``.

    Raises:
        AttributeError: there is no such function.
    """
    return _address(ctypes.CDLL(None).clock_gettime)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class ThreadTeam:
    """Runs kernels on the calling thread, or on all of torch's threads."""

    def __init__(self) -> None:
        self._openmp = find_openmp()
        if self._openmp is None:
            logger.warning("torch's OpenMP runtime is not callable: attention runs on one thread")

    @property
    def size_function(self) -> int:
        """Address of ``int team_size()``, for kernels on several threads; 0: one is all."""
        return 0 if self._openmp is None else self._openmp.team_size

    def num_threads(self) -> int:
        """Threads of a parallel run at most; each needs scratch memory."""
        return torch.get_num_threads() if self._openmp is not None else 1

    def run(self, kernel: Kernel, address: int, num_threads: int) -> None:
        """Run a kernel with the arguments at an address on each of ``num_threads`` threads.

        Returns when all of them are done.
        """
        capture = _capture.get()
        if capture is not None:
            capture.add(kernel, address)
        elif num_threads == 1 or self._openmp is None:
            _FUNCTION(kernel.address)(address)
        else:
            self._openmp.parallel_region(kernel.address, address, num_threads, 0)
