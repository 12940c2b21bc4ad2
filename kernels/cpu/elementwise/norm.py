"""Normalization on CPUs: checks a call and runs the kernel."""

import ctypes

import torch

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.kernel_arguments import float_bits
from kernels.cpu.runtime.simd import LANES
from kernels.cpu.runtime.thread_team import ThreadTeam

# Less is left to the calling thread: waking the others would take longer.
_SERIAL_ELEMENTS = 64 * 1024


class CpuNorm:
    """Normalization of rows, computed in float32.

    RMS: x / sqrt(mean(x^2) + epsilon) * weight. By mean and variance:
    (x - mean) / sqrt(variance + epsilon) * weight + bias.

    Args:
        team: runs the kernel.
        kernel: for inputs and outputs of ``dtype``.
        weight: [D] float32.
        bias: [D] float32, for the kernel that adds one.
        epsilon: keeps rows of zeros finite.
        dtype: of inputs and outputs.
    """

    def __init__(
        self,
        team: ThreadTeam,
        kernel: Kernel,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        for each in (weight, weight if bias is None else bias):
            if each.dtype != torch.float32 or len(each) % LANES or len(each) != len(weight):
                raise ValueError(f"weight [{len(each)}] of {each.dtype} is not served")
        self._team = team
        self._kernel = kernel
        self._bias = bias
        self._weight = weight
        self._dim = len(weight)
        self._dtype = dtype
        self._args = (ctypes.c_int64 * fields.NORM_LAYOUT.num_fields)()
        self._address = ctypes.addressof(self._args)
        self._args[fields.NORM_DIM] = self._dim
        self._args[fields.NORM_WEIGHT] = weight.data_ptr()
        self._args[fields.NORM_EPSILON] = float_bits(epsilon)
        self._args[fields.NORM_BIAS] = 0 if bias is None else bias.data_ptr()

    def __call__(
        self,
        x: torch.Tensor,  # [..., D]
    ) -> torch.Tensor:
        """Normalized rows [..., D].

        Raises:
            ValueError: the input does not fit the weight.
        """
        if x.shape[-1] != self._dim or x.dtype != self._dtype:
            expected = f"[..., {self._dim}] of {self._dtype}"
            raise ValueError(f"input {tuple(x.shape)} of {x.dtype}; expected {expected}")
        if not x.is_contiguous():
            if (
                x.dim() == 4 and x.transpose(1, 2).is_contiguous()
            ):  # [1, H, T, D], a view of [1, T, H, D]
                return self(x.transpose(1, 2)).transpose(1, 2)
            x = x.contiguous()
        out = torch.empty_like(x)
        size = x.numel()
        row_bytes = self._dim * self._dtype.itemsize
        num_rows = size // self._dim
        self._args[0:7] = [0, 0, x.data_ptr(), row_bytes, out.data_ptr(), row_bytes, num_rows]
        threads = 1 if size < _SERIAL_ELEMENTS else self._team.num_threads()
        self._team.run(self._kernel, self._address, threads)
        return out
