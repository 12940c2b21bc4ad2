"""Counts what a GPU would launch: Triton's kernels, and operations of torch that compute."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# Operations beside views that only allocate or describe memory.
_LAUNCHES_NOTHING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count the launches of a block, by names of kernels and of operations.

    Triton's kernels run in its interpreter; what that calls of torch is not counted.
    """
    mode = _Operations()
    own = GridExecutor.__call__

    def launched(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        mode.launches[executor.fn.__name__] += 1
        mode.is_inside_kernel = True
        try:
            own(executor, *arguments, **options)
        finally:
            mode.is_inside_kernel = False

    GridExecutor.__call__ = launched
    try:
        with mode:
            yield mode.launches
    finally:
        GridExecutor.__call__ = own


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch outside of Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.is_inside_kernel = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if self.is_inside_kernel:
            return func(*args, **options)
        with self:  # what is made of other operations is counted as these
            made = func.decompose(*args, **options)
        if made is not NotImplemented:
            return made
        if _computes(func):
            self.launches[func.overloadpacket.__name__] += 1
        return func(*args, **options)


def _computes(operation: OpOverload) -> bool:
    """Whether an operation launches a kernel: a view of its argument does not."""
    results = operation._schema.returns
    is_view = any(each.alias_info and not each.alias_info.is_write for each in results)
    return not is_view and operation.overloadpacket.__name__ not in _LAUNCHES_NOTHING
