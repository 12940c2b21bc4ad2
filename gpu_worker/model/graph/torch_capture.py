"""Torch's own operators while kernels are captured: it allocates, makes views, adds, multiplies by
a number, and looks up embeddings.

Anything else would be computed once, at capture, and not in replays: it is refused.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.elementwise.elementwise import CpuElements
from kernels.cpu.elementwise.elementwise_arguments import TOKEN_LOOKUP_LAYOUT
from kernels.cpu.elementwise.table_lookup import CpuLookups

_aten = torch.ops.aten


class CannotCapture(Exception):
    """A model computes something that a captured graph cannot hold."""


class Arena:
    """Memory that captured ops read and write; freed memory is given out again.

    A graph runs ops in the order of their capture, so memory that was free at a capture is free in
    every replay.
    """

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._free: dict[int, list[Any]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """All memory, free or not."""
        return sum(memory.nbytes for memory in self._all)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is the arena's."""
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


class TorchCapture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocates tensors in an arena, and captures or refuses what torch would compute.

    Args:
        arena: of the graph.
        elements: computes sums and multiples.
        token_ids: that embeddings are looked up by; None: lookups are refused.
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
            raise CannotCapture(f"{func} copies")
        raise CannotCapture(f"it calls {func}")

    def _is_number(self, value: Any) -> bool:
        """Whether it is the same in every step; the outputs of captured ops are not."""
        if isinstance(value, torch.Tensor):
            return value.dim() == 0 and not self._arena.holds(value)
        return isinstance(value, float)

    def _sum(self, left: Any, right: Any) -> torch.Tensor:
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            raise CannotCapture(f"it adds {type(left).__name__} and {type(right).__name__}")
        try:
            with self:  # the sum lies in the arena
                return self._elements.add(left, right)
        except ValueError as error:
            raise CannotCapture(f"it adds: {error}") from error

    def _multiple(self, x: torch.Tensor, number: float) -> torch.Tensor:
        try:
            with self:
                return self._elements.scale(x, number)
        except ValueError as error:
            raise CannotCapture(f"it multiplies: {error}") from error

    def _embeddings(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        with self:
            found = table.new_empty((*token_ids.shape, table.shape[1]))
        rows = found.view(-1, table.shape[1])
        try:
            CpuLookups().look_up(TOKEN_LOOKUP_LAYOUT, table, token_ids.flatten(), rows)
        except ValueError as error:
            raise CannotCapture(f"it looks up: {error}") from error
        return found


def _memory(tensor: Any) -> int | None:
    """The address of a tensor's memory."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.untyped_storage().data_ptr()
