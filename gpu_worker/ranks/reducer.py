"""Sums of partial outputs over all ranks, inside of a forward pass.

On a CPU a sum is an op of a captured graph, which calls back here: it cannot raise there. A sum
that failed is remembered, and the step's results must not be used.
"""

import ctypes
import time
from typing import Protocol

import torch
from torch import nn

from gpu_worker.ranks.collectives import Collectives
from gpu_worker.ranks.member import GroupOver
from kernels.cpu.runtime import callout
from kernels.cpu.runtime.callout import CALLOUT_LAYOUT, callout_kernel
from kernels.cpu.runtime.thread_team import ThreadTeam, is_capturing

_DTYPES = (torch.float32, torch.bfloat16)
SUMMED = "inner"
"""Name in a SummedOutput of the layer whose outputs are summed."""
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_MOST_VIEWS = 4_096


class Reducer(Protocol):
    """Adds partial outputs of all ranks."""

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type; the partial one is overwritten.

        Raises:
            GroupOver: a rank is gone or late.
        """


class DeviceReducer:
    """Sums on a GPU, in the order of its stream."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type."""
        total = partial.float().contiguous()
        self._collectives.sum(total)
        return total.to(dtype)


class HostReducer:
    """Sums on a CPU, as ops that a graph can capture.

    Attributes:
        failure: of the first sum that failed; later ones return at once.
        seconds: spent in sums so far.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.failure: GroupOver | None = None
        self.seconds = 0.0
        self._collectives = collectives
        self._team = ThreadTeam()
        self._kernel = callout_kernel()
        self._args = (ctypes.c_int64 * CALLOUT_LAYOUT.num_fields)()
        self._callback = _FUNCTION(self._call)  # kept, since kernels have its address
        self._function = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type; the partial one is overwritten.

        Raises:
            GroupOver: a rank is gone or late.
        """
        if not partial.is_contiguous():
            partial = partial.contiguous()
        out = partial if partial.dtype == dtype else partial.new_empty(partial.shape, dtype=dtype)
        args = self._args
        args[:] = [
            0,
            0,
            self._function,
            partial.data_ptr(),
            out.data_ptr(),
            partial.numel(),
            _DTYPES.index(partial.dtype),
            _DTYPES.index(dtype),
        ]
        self._team.run(self._kernel, ctypes.addressof(args), 1)
        if self.failure is not None and not is_capturing():
            raise self.failure
        return out

    def _call(self, address: int) -> None:
        """Called by the kernel, on any thread."""
        if self.failure is not None:
            return
        began_s = time.perf_counter()
        try:
            fields = (ctypes.c_int64 * CALLOUT_LAYOUT.num_fields).from_address(address)
            size = fields[callout.ELEMENTS]
            partial = self._view(fields[callout.INPUT], size, fields[callout.INPUT_TYPE])
            out = self._view(fields[callout.OUTPUT], size, fields[callout.OUTPUT_TYPE])
            total = partial if partial.dtype == torch.float32 else partial.float()
            self._collectives.sum(total)
            if total is not out:
                out.copy_(total)
        except GroupOver as error:
            self.failure = error
        except Exception as error:  # it must not get into compiled code
            self.failure = GroupOver(f"a sum failed: {type(error).__name__}: {error}")
        self.seconds += time.perf_counter() - began_s

    def _view(self, address: int, size: int, kind: int) -> torch.Tensor:
        """The elements at an address as a tensor."""
        key = address, size, kind
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            dtype = _DTYPES[kind]
            memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
            found = self._views[key] = torch.frombuffer(memory, dtype=dtype)
        return found


class SummedOutput(nn.Module):
    """A layer that computes a part of its sums: those over this rank's inputs.

    Args:
        inner: the layer, or the last of several.
        reducer: adds the parts of all ranks.
        dtype: of the sums.
    """

    def __init__(self, inner: nn.Module, reducer: Reducer, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self._reducer = reducer
        self._dtype = dtype

    def forward(
        self,
        x: torch.Tensor,  # [..., K]
    ) -> torch.Tensor:
        """Outputs [..., N] of the whole layer."""
        return self._reducer.sum(self.inner(x), self._dtype)
