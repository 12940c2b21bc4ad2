"""Entry points of the CPU kernels as C functions, from numba's cache when it has them."""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

from kernels.cpu.attention.attention_kernel import attend_tasks
from kernels.cpu.attention.cache_write_kernel import write_tasks
from kernels.cpu.blocks.block_move_kernel import move_tasks
from kernels.cpu.elementwise.lookup_kernel import lookup_tasks
from kernels.cpu.runtime.bf16_dot import emulated_pair_tag, pair_tag
from kernels.cpu.runtime.graph_executor import play_tape
from kernels.cpu.runtime.instruction_set import Dot
from kernels.cpu.runtime.kernel_kinds import ATTEND, MOVE, TAPE, WRITE, JobKind
from kernels.cpu.runtime.prefetch import for_read_once
from kernels.cpu.runtime.simd import bfloat16_tag, float32_tag

_FOLDER = Path(__file__).parents[1]
_SLOW_S = 1.0  # more than it takes to load one from the cache

logger = logging.getLogger(__name__)

_SIGNATURE = types.void(types.int64)


_PAIR_TAGS = {Dot.NATIVE: pair_tag, Dot.EMULATED: emulated_pair_tag}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled ``void kernel(int64 job)`` that threads may enter together."""

    address: int
    kind: JobKind
    from_cache: bool
    code: object  # what owns the memory at the address


@cache
def write_kernel() -> Kernel:
    """The cache write, for elements of any type."""
    version = source_version()

    def write(job):
        if version:
            write_tasks(job)

    return compile_entry(write, WRITE)


@cache
def move_kernel() -> Kernel:
    """Moves of whole blocks, of elements of any type."""
    version = source_version()

    def move(job):
        if version:
            move_tasks(job)

    return compile_entry(move, MOVE)


@cache
def lookup_kernel(kind: JobKind) -> Kernel:
    """Lookups of rows of any type, by what the kind says."""
    version = source_version()

    def lookup(job):
        if version:
            lookup_tasks(job)

    return compile_entry(lookup, kind)


@cache
def tape_kernel() -> Kernel:
    """Jobs of all kinds, one after the other."""
    version = source_version()

    def tape(job):
        if version:
            play_tape(job)

    return compile_entry(tape, TAPE)


@cache
def attend_kernel(dtype: torch.dtype, dot: Dot) -> Kernel:
    """Paged attention over elements of this type; bfloat16 is multiplied as ``dot`` says.

    Raises:
        ValueError: if there is no kernel for the type.
    """
    version, tag = source_version(), element_tag(dtype)
    if dtype == torch.bfloat16:
        tag = _PAIR_TAGS.get(dot, tag)

    def attend(job):
        if version:
            attend_tasks(job, tag)

    return compile_entry(attend, ATTEND)


def element_tag(dtype: torch.dtype) -> Any:
    """How kernels know elements of a type (see simd).

    Raises:
        ValueError: if they do not.
    """
    if dtype == torch.float32:
        return float32_tag
    if dtype == torch.bfloat16:
        return bfloat16_tag
    raise ValueError(f"no CPU kernel for {dtype}")


@cache
def source_version() -> int:
    """A number that changes with any source of the CPU kernels, never zero.

    numba keys its cache by the entry function and what it closes over, not by the functions that
    it calls: closing over this number keeps a stale kernel from being loaded. It does not look at
    caches either, and two CPUs of one name may differ in them where one is virtual.
    """
    digest = hashlib.sha256(bytes([for_read_once()]) + digest_of(_FOLDER))
    return int.from_bytes(digest.digest()[:6], "little") | 1


def digest_of(folder: Path) -> bytes:
    """A digest of the names and contents of all Python files in a folder and those below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.digest()


def compile_entry(entry: Callable[[int], None], kind: JobKind) -> Kernel:
    """A C function for jobs of a kind, from numba's cache when it has it."""
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
    return Kernel(compiled.address, kind, compiled.cache_hits > 0, compiled)
