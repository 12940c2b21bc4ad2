"""What torch does while jobs are recorded: it allocates, looks at memory in other shapes, adds,
multiplies by a number, and looks up embeddings.

All else would happen once, at recording, and not when the tape is played: it is refused.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.elementwise.elementwise import CpuElements
from kernels.cpu.elementwise.table_lookup import CpuLookups
from kernels.cpu.runtime.kernel_kinds import LOOKUP_OF_TOKENS

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

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies here."""
        at = tensor.data_ptr()
        return any(0 <= at - each.ctypes.data < each.nbytes for each in self._all)

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
        token_ids: what embeddings are looked up by; None: nothing is looked up.
    """

    def __init__(
        self, arena: Arena, elements: CpuElements, token_ids: torch.Tensor | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._elements = elements
        self._token_ids = token_ids

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
        if func is _aten.mul.Tensor and len(args) == 2 and self._is_number(args[1]):
            return self._multiple(args[0], float(args[1]))
        if func is _aten._to_copy.default and self._is_number(args[0]):
            return func(*args, **kwargs)
        if func is _aten.embedding.default and _memory(args[1]) == _memory(self._token_ids):
            return self._embeddings(*args[:2])
        if func.is_view:
            found = func(*args, **kwargs)
            parts = found if isinstance(found, tuple | list) else (found,)
            if all(_memory(part) == _memory(args[0]) for part in parts):
                return found
            raise CannotRecord(f"{func} copies")
        raise CannotRecord(f"it calls {func}")

    def _is_number(self, value: Any) -> bool:
        """Whether it is the same in every step, as what jobs have written is not."""
        if isinstance(value, torch.Tensor):
            return value.dim() == 0 and not self._arena.holds(value)
        return isinstance(value, float)

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

    def _embeddings(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        with self:
            found = table.new_empty((*token_ids.shape, table.shape[1]))
        rows = found.view(-1, table.shape[1])
        try:
            CpuLookups().look_up(LOOKUP_OF_TOKENS, table, token_ids.flatten(), rows)
        except ValueError as error:
            raise CannotRecord(f"it looks up: {error}") from error
        return found


def _memory(tensor: Any) -> int | None:
    """Where a tensor's memory begins."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.untyped_storage().data_ptr()
