"""What torch does while jobs are recorded: it allocates, looks at memory in other shapes, and adds.

All else would happen once, at recording, and not when the tape is played: it is refused.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu_elements import CpuElements

_aten = torch.ops.aten


class CannotRecord(Exception):
    """A model computes something that no tape can hold."""


class Arena:
    """Memory of what jobs read and write, given out again when nobody holds it any more.

    A tape runs jobs in the order in which they were recorded, so memory that was free then is free
    when it is played.
    """

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._free: dict[int, list[Any]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """All that there is."""
        return sum(memory.nbytes for memory in self._all)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor; its memory is free again when it and all views of it are gone."""
        num_bytes = max(1, int(np.prod(shape)) * dtype.itemsize)
        free = self._free[num_bytes]
        if free:
            memory = free.pop()
        else:
            memory = np.empty(num_bytes + 64, np.uint8)
            memory = memory[-memory.ctypes.data % 64 :][:num_bytes]
            self._all.append(memory)
        lent = memory[:]  # torch holds it for as long as it holds the memory
        weakref.finalize(lent, free.append, memory)
        return torch.from_numpy(lent).view(dtype).view(shape)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meanwhile tensors lie in an arena, and what torch would compute is refused or passed on.

    Args:
        arena: of the tape.
        elements: sums and multiples as jobs.
    """

    def __init__(self, arena: Arena, elements: CpuElements) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._elements = elements

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.empty.memory_format:
            return self._arena.empty(tuple(args[0]), kwargs["dtype"])
        if func is _aten.new_empty.default:
            return self._arena.empty(tuple(args[1]), kwargs.get("dtype") or args[0].dtype)
        if func is _aten.empty_like.default:
            return self._arena.empty(tuple(args[0].shape), kwargs.get("dtype") or args[0].dtype)
        if func is _aten.add.Tensor and len(args) == 2 and not kwargs:
            return self._sum(*args)
        if func is _aten.dropout.default and not args[2]:
            return args[0]
        if func is _aten.mul.Tensor and len(args) == 2 and isinstance(args[1], float):
            return self._multiple(*args)
        if func.is_view:
            found = func(*args, **kwargs)
            parts = found if isinstance(found, tuple | list) else (found,)
            if all(_memory(part) == _memory(args[0]) for part in parts):
                return found
            raise CannotRecord(f"{func} copies")
        raise CannotRecord(f"it calls {func}")

    def _sum(self, left: Any, right: Any) -> torch.Tensor:
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            raise CannotRecord(f"it adds {type(left).__name__} and {type(right).__name__}")
        try:
            with self:  # the sum lies in the arena
                return self._elements.add(left, right)
        except ValueError as error:
            raise CannotRecord(f"it adds: {error}") from error

    def _multiple(self, x: torch.Tensor, number: float) -> torch.Tensor:
        try:
            with self:
                return self._elements.scale(x, number)
        except ValueError as error:
            raise CannotRecord(f"it multiplies: {error}") from error


def _memory(tensor: Any) -> int | None:
    """Where a tensor's memory begins."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.untyped_storage().data_ptr()
