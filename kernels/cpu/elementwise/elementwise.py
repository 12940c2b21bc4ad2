"""Sums and activations of tensors on CPUs, element by element."""

import ctypes
from enum import IntEnum

import torch

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.elementwise.activation_kernel import activate_kernel
from kernels.cpu.elementwise.add_kernel import add_kernel
from kernels.cpu.runtime.kernel_arguments import float_bits
from kernels.cpu.runtime.thread_team import ThreadTeam

# Work below this runs on the calling thread: waking the others would take longer.
_SERIAL_ELEMENTS = 64 * 1024


class Activation(IntEnum):
    """Functions of one number that have a kernel."""

    RELU = fields.RELU
    GELU = fields.GELU
    """x * Phi(x), the Gaussian error linear unit (Hendrycks and Gimpel, 2016)."""
    GELU_TANH = fields.GELU_TANH
    """Its approximation by a hyperbolic tangent."""


class CpuElements:
    """Functions of contiguous tensors, element by element.

    Args:
        team: runs the kernels.
    """

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left + right, of one shape and type, contiguous.

        Raises:
            ValueError: they are not.
        """
        _check_pair(left, right)
        out = torch.empty_like(left)
        size = left.numel()
        args = (ctypes.c_int64 * fields.ADD_LAYOUT.num_fields)()
        args[2:6] = [left.data_ptr(), right.data_ptr(), out.data_ptr(), size]
        self._team.run(add_kernel(left.dtype), ctypes.addressof(args), self._threads(size))
        return out

    def activate(
        self,
        activation: Activation,
        x: torch.Tensor,  # contiguous
        factor: torch.Tensor | None = None,  # as x
    ) -> torch.Tensor:
        """The activation of x, times a factor if there is one, rounded once.

        Raises:
            ValueError: shapes or types are not the same, or something is not contiguous.
        """
        return self._activate(activation, 1.0, x, factor)

    def scale(self, x: torch.Tensor, number: float) -> torch.Tensor:
        """x * number; the number is rounded to float32.

        Raises:
            ValueError: x is not contiguous.
        """
        return self._activate(fields.LINEAR, number, x, None)

    def _activate(
        self, function: int, slope: float, x: torch.Tensor, factor: torch.Tensor | None
    ) -> torch.Tensor:
        _check_pair(x, x if factor is None else factor)
        out = torch.empty_like(x)
        size = x.numel()
        args = (ctypes.c_int64 * fields.ACTIVATION_LAYOUT.num_fields)()
        args[fields.ACTIVATED] = x.data_ptr()
        args[fields.FACTOR] = 0 if factor is None else factor.data_ptr()
        args[fields.ACTIVATE_OUT] = out.data_ptr()
        args[fields.ACTIVATE_ELEMENTS] = size
        args[fields.ACTIVATION] = function
        args[fields.SLOPE] = float_bits(slope)
        self._team.run(activate_kernel(x.dtype), ctypes.addressof(args), self._threads(size))
        return out

    def _threads(self, num_elements: int) -> int:
        return 1 if num_elements < _SERIAL_ELEMENTS else self._team.num_threads()


def _check_pair(left: torch.Tensor, right: torch.Tensor) -> None:
    if left.shape != right.shape or left.dtype != right.dtype:
        one, other = (f"{each.dtype} {tuple(each.shape)}" for each in (left, right))
        raise ValueError(f"{one} and {other} are not alike")
    if not (left.is_contiguous() and right.is_contiguous()):
        raise ValueError("operands must be contiguous")
