"""Drawing tokens from logits on CPUs, on the threads that computed them (see sample_kernel)."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.runtime.entry_points import Kernel, compile_entry, element_tag, source_version
from kernels.cpu.runtime.kernel_kinds import DRAW
from kernels.cpu.runtime.thread_team import TeamRunner
from kernels.cpu.sampling import sample_arguments as jobs
from kernels.cpu.sampling.sample_kernel import draw_tasks

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]


@cache
def draw_kernel(dtype: torch.dtype) -> Kernel:
    """Draws from logits of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)

    def draw(job):
        if version:
            draw_tasks(job, tag)

    return compile_entry(draw, DRAW)


def load() -> None:
    """Compile now, or load from numba's cache, what the first draw would wait for."""
    for dtype in (torch.float32, torch.bfloat16):
        draw_kernel(dtype)


class Drawing:
    """Draws tokens; what it needs for that is reused from step to step.

    Not thread-safe: one call at a time.
    """

    def __init__(self) -> None:
        self._team = TeamRunner()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._job = (ctypes.c_int64 * jobs.DRAW_FIELDS)()
        self._address = ctypes.addressof(self._job)

    def draw(
        self,
        logits: torch.Tensor,  # [R, V] float32 or bfloat16, rows contiguous
        rows: _Ints,  # [D] those that are drawn from
        temperature: _Floats,  # [D], above 0
        top_k: _Ints,  # [D], 0 keeps all
        top_p: _Floats,  # [D], 1 keeps all
        min_p: _Floats,  # [D], 0 keeps all
        keys: npt.NDArray[np.int32],  # [2, D], of the noise
        tokens: _Ints,  # [R] where each row is largest first; those of ``rows`` become the drawn
    ) -> None:
        """Draw a token for each of the rows.

        Raises:
            ValueError: shapes or types do not fit each other.
        """
        num_drawn, (num_rows, size) = len(rows), logits.shape
        each = (num_drawn,)
        _check("rows", rows, np.int64, each)
        _check("temperature", temperature, np.float32, each)
        _check("top_k", top_k, np.int64, each)
        _check("top_p", top_p, np.float32, each)
        _check("min_p", min_p, np.float32, each)
        _check("keys", keys, np.int32, (2, num_drawn))
        _check("tokens", tokens, np.int64, (num_rows,))
        if logits.stride(1) != 1:
            raise ValueError(f"logits with strides {logits.stride()} are not contiguous in a row")
        if num_drawn == 0:
            return
        threads = min(num_drawn, self._team.num_threads())
        scratch_bytes = jobs.scratch_bytes(size)
        if len(self._scratch) < threads * scratch_bytes:
            self._scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
        self._job[:] = [
            0,
            0,
            logits.data_ptr(),
            logits.stride(0) * logits.itemsize,
            size,
            num_drawn,
            rows.ctypes.data,
            temperature.ctypes.data,
            top_p.ctypes.data,
            min_p.ctypes.data,
            top_k.ctypes.data,
            keys.ctypes.data,
            keys[1:].ctypes.data,
            tokens.ctypes.data,
            self._scratch.data_ptr(),
            scratch_bytes,
        ]
        self._team.run(draw_kernel(logits.dtype), self._address, threads)


def _check(name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        found = f"{name} {array.shape} of {array.dtype}"
        raise ValueError(f"{found}; expected {shape} of {np.dtype(dtype)}, contiguous")
