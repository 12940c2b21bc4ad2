"""Entry points of the CPU kernels: C functions, compiled by numba or loaded from its disk cache."""

import hashlib
import logging
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from numba import cfunc, types

from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.prefetch import read_once_cache
from kernels.cpu.runtime.simd import bfloat16_tag, float32_tag, int8_tag

_FOLDER = Path(__file__).parents[1]
_SLOW_S = 1.0  # more than loading from the cache takes
_SIGNATURE = types.void(types.int64)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A C function ``void kernel(int64 args)`` that several threads may run at the same time.

    Attributes:
        address: of the function.
        layout: of its arguments.
        from_cache: whether numba's disk cache had it.
        code: owns the memory at the address.
    """

    address: int
    layout: ArgumentLayout
    from_cache: bool
    code: object


def compile_kernel(tasks: Any, layout: ArgumentLayout, *tags: Any, also_version: int = 0) -> Kernel:
    """``tasks(args, *tags)`` as a C function, loaded from numba's disk cache if that has it.

    Args:
        tasks: a jitted function that runs tasks until none is left.
        layout: of its first argument.
        tags: numpy scalars whose types specialize it.
        also_version: changes with anything outside of the kernels' folder that it depends on.
    """
    template = _template(source_version() + also_version, tags)
    # numba keys its cache by name, bytecode and closure. ``tasks`` must be no part of the closure:
    # a jitted function is pickled with an id that differs in every process.
    names = {"__name__": __name__, "tasks": tasks}
    entry = FunctionType(template.__code__, names, tasks.__name__, None, template.__closure__)
    entry.__qualname__ = f"{tasks.__module__}.{tasks.__name__}"
    began_s = time.monotonic()
    try:
        compiled = cfunc(_SIGNATURE, cache=True)(entry)
    except RuntimeError as error:  # no folder to write the cache to
        logger.warning("kernels are compiled at every start: %s", error)
        compiled = cfunc(_SIGNATURE)(entry)
    seconds = time.monotonic() - began_s
    if seconds > _SLOW_S:
        fields = {"name": entry.__name__, "seconds": round(seconds, 1)}
        logger.info("CPU kernel compiled", extra={"fields": fields})
    return Kernel(compiled.address, layout, compiled.cache_hits > 0, compiled)


def _template(version: int, tags: tuple[Any, ...]) -> Any:
    def entry(args):
        if version:  # always; what is not used is no part of the closure
            tasks(args, *tags)  # type: ignore[name-defined]  # noqa: F821 - a global of the entry

    return entry


def element_tag(dtype: torch.dtype) -> Any:
    """The element tag of a type (see simd).

    Raises:
        ValueError: no kernel serves the type.
    """
    if dtype == torch.float32:
        return float32_tag
    if dtype == torch.bfloat16:
        return bfloat16_tag
    if dtype == torch.int8:
        return int8_tag
    raise ValueError(f"no CPU kernel for {dtype}")


@cache
def source_version() -> int:
    """A number, never zero, that changes with any source of the CPU kernels.

    numba does not notice changes in functions that the entry point calls. It does not know caches
    either, and two virtual CPUs of one name may differ in them.
    """
    digest = hashlib.sha256(bytes([read_once_cache()]) + digest_of(_FOLDER))
    return int.from_bytes(digest.digest()[:6], "little") | 1


def digest_of(folder: Path) -> bytes:
    """A digest of the names and contents of all Python files in a folder and those below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.digest()
