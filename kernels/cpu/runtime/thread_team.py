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
    """Entry points of an OpenMP runtime.

    Attributes:
        parallel_region: enters a function (its address, an argument, threads, flags).
        team_size: address of what tells a thread, inside, how many have entered.
    """

    parallel_region: Callable[[int, int, int, int], None]
    team_size: int


class Recorder(Protocol):
    """Notes jobs."""

    def note(self, kernel: Kernel, job: int) -> None:
        """This kernel would run now, with the job at this address."""


_recorder: ContextVar[Recorder | None] = ContextVar("_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Meanwhile no kernel that this thread calls runs: each is noted."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def find_openmp() -> OpenMP | None:
    """The OpenMP runtime that torch is linked to, or None.

    Looking a symbol up in torch's library searches what that library was linked to, so a second
    runtime in the process is never hit. LLVM's runtime offers the same entry points on Linux.
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


def find_give_way() -> int:
    """Address of what lets other threads have the core; 0 where there is none."""
    try:
        return _address(ctypes.CDLL(None).sched_yield)
    except (AttributeError, OSError, TypeError):
        return 0


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class TeamRunner:
    """Enters a kernel with one thread, or with all of torch's."""

    def __init__(self) -> None:
        self._openmp = find_openmp()
        if self._openmp is None:
            logger.warning("torch's OpenMP runtime is not callable: attention runs on one thread")

    @property
    def team_size(self) -> int:
        """Address of ``int team_size()``, for kernels that run on several threads; 0: none do."""
        return 0 if self._openmp is None else self._openmp.team_size

    def num_threads(self) -> int:
        """Threads that a parallel run may enter; scratch must be there for each."""
        return torch.get_num_threads() if self._openmp is not None else 1

    def run(self, kernel: Kernel, job: int, num_threads: int) -> None:
        """Enter a kernel with the job at an address on each of ``num_threads`` threads.

        Returns when all of them are done.
        """
        recorder = _recorder.get()
        if recorder is not None:
            recorder.note(kernel, job)
        elif num_threads == 1 or self._openmp is None:
            _FUNCTION(kernel.address)(job)
        else:
            self._openmp.parallel_region(kernel.address, job, num_threads, 0)
