"""Sums of partial outputs over all ranks on CPUs.

A sum is an op of a captured graph, which cannot raise: a failure is kept, and the step's results
must not be used. Without shared memory that op calls back here.
"""

import ctypes
import time

import torch

from gpu_worker.ranks.collectives import Collectives, SumTotals
from gpu_worker.ranks.member import GroupOver
from gpu_worker.ranks.reducer import Reducer
from gpu_worker.ranks.shared_memory import SharedCollectives
from kernels.cpu.runtime import callout
from kernels.cpu.runtime.callout import CALLOUT_LAYOUT, callout_kernel
from kernels.cpu.runtime.thread_team import ThreadTeam, is_capturing

_DTYPES = (torch.float32, torch.bfloat16)
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_MOST_VIEWS = 4_096


def reducer_of(collectives: Collectives) -> Reducer:
    """The reducer for collectives of a CPU."""
    if isinstance(collectives, SharedCollectives):
        return SharedReducer(collectives)
    return HostReducer(collectives)


class SharedReducer:
    """Sums on a CPU through shared memory, as ops that a graph can capture."""

    def __init__(self, collectives: SharedCollectives) -> None:
        self._collectives = collectives

    @property
    def failure(self) -> GroupOver | None:
        """Of the first exchange that failed; later ones return at once."""
        return self._collectives.failure

    @property
    def totals(self) -> SumTotals:
        """Of all sums so far."""
        return self._collectives.totals

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all ranks, rounded once to a type; the partial one is overwritten.

        Raises:
            GroupOver: a rank is gone or late.
        """
        partial, out = _in_place(partial, dtype)
        self._collectives.add(partial, out)
        if self.failure is not None and not is_capturing():
            raise self.failure
        return out


class HostReducer:
    """Sums on a CPU by other collectives, as ops that a graph can capture.

    Attributes:
        failure: of the first sum that failed; later ones return at once.
        totals: of all sums so far.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.failure: GroupOver | None = None
        self.totals = SumTotals(0.0, 0, 0)
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
        partial, out = _in_place(partial, dtype)
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
        began_s, num_bytes = time.perf_counter(), 0
        try:
            fields = (ctypes.c_int64 * CALLOUT_LAYOUT.num_fields).from_address(address)
            size = fields[callout.ELEMENTS]
            partial = self._view(fields[callout.INPUT], size, fields[callout.INPUT_TYPE])
            out = self._view(fields[callout.OUTPUT], size, fields[callout.OUTPUT_TYPE])
            total = partial if partial.dtype == torch.float32 else partial.float()
            num_bytes = total.nbytes
            self._collectives.sum(total)
            if total is not out:
                out.copy_(total)
        except GroupOver as error:
            self.failure = error
        except Exception as error:  # it must not get into compiled code
            self.failure = GroupOver(f"a sum failed: {type(error).__name__}: {error}")
        so_far, seconds = self.totals, time.perf_counter() - began_s
        self.totals = SumTotals(
            so_far.seconds + seconds, so_far.count + 1, so_far.num_bytes + num_bytes
        )

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


def _in_place(partial: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous partial output, and the tensor for its sum: the same, if the type is."""
    partial = partial.contiguous()
    if partial.dtype == dtype:
        return partial, partial
    return partial, partial.new_empty(partial.shape, dtype=dtype)
