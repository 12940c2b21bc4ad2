"""Samples tokens from logits on CPUs, on the threads that computed them (see sample_kernel)."""

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.thread_team import ThreadTeam
from kernels.cpu.sampling import sample_arguments
from kernels.cpu.sampling.sample_kernel import sample_tasks

_Ints = npt.NDArray[np.int64]


@cache
def sample_kernel(dtype: torch.dtype) -> Kernel:
    """The kernel that samples from logits of this type.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    # The places of parameters follow from a table outside of the folder of kernels.
    places = sample_arguments.parameters_version()
    layout = sample_arguments.SAMPLE_LAYOUT
    return compile_kernel(sample_tasks, layout, element_tag(dtype), also_version=places)


def load() -> None:
    """Compile now, or load from numba's cache, what the first call would wait for."""
    for dtype in (torch.float32, torch.bfloat16):
        sample_kernel(dtype)


class CpuSampler:
    """Samples tokens; its memory is reused from step to step.

    Not thread-safe: one call at a time.
    """

    def __init__(self) -> None:
        self._team = ThreadTeam()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arguments = (ctypes.c_int64 * sample_arguments.SAMPLE_LAYOUT.num_fields)()
        self._address = ctypes.addressof(self._arguments)

    def sample(
        self,
        logits: torch.Tensor,  # [R, V] float32 or bfloat16, rows contiguous
        rows: _Ints,  # [N] rows to sample from
        parameters: Mapping[str, npt.NDArray[Any]],  # [N] each; temperatures above 0
        keys: npt.NDArray[np.int32],  # [2, N] of the Gumbel noise
        tokens: _Ints,  # [R] argmax of each row; those of ``rows`` become the sampled tokens
    ) -> None:
        """Sample a token from each of the rows.

        Raises:
            ValueError: shapes or types do not fit each other.
        """
        num_sampled, (num_rows, size) = len(rows), logits.shape
        each = (num_sampled,)
        _check("rows", rows, np.int64, each)
        for parameter in sample_arguments.SAMPLE_PARAMETERS:
            _check(parameter.name, parameters[parameter.name], parameter.column, each)
        _check("keys", keys, np.int32, (2, num_sampled))
        _check("tokens", tokens, np.int64, (num_rows,))
        if logits.stride(1) != 1:
            raise ValueError(f"logits with strides {logits.stride()} are not contiguous in a row")
        if num_sampled == 0:
            return
        threads = min(num_sampled, self._team.num_threads())
        scratch_bytes = sample_arguments.scratch_bytes(size)
        if len(self._scratch) < threads * scratch_bytes:
            self._scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
        self._arguments[:] = [
            0,
            0,
            logits.data_ptr(),
            logits.stride(0) * logits.itemsize,
            size,
            num_sampled,
            rows.ctypes.data,
            keys.ctypes.data,
            keys[1:].ctypes.data,
            tokens.ctypes.data,
            self._scratch.data_ptr(),
            scratch_bytes,
            *(parameters[of.name].ctypes.data for of in sample_arguments.SAMPLE_PARAMETERS),
        ]
        self._team.run(sample_kernel(logits.dtype), self._address, threads)


def _check(name: str, array: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        found = f"{name} {array.shape} of {array.dtype}"
        raise ValueError(f"{found}; expected {shape} of {np.dtype(dtype)}, contiguous")
