"""Prefetches in LLVM IR, and the cache that they fill.

Data that a step reads once, all keys and values and, for few rows, all weights, is many times as
large as the caches, where it would only replace other code and data. So it had best be in the L1
cache alone until it is read. But there it must fit beside what is being read, twice a tile of keys
and values, and a core can wait for fewer lines on their way to the L1 cache than to the L2 cache.
"""

from enum import IntEnum
from functools import cache
from pathlib import Path

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.runtime.simd import I32

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_FILES = ("level", "type", "size")
# L1 was the better place on cores with 48 KB of it (Zen 5), L2 on those with 32 KB (Zen 4), by a
# sixth of the time of a step.
_LARGE_BYTES = 48 * 1024


class Cache(IntEnum):
    """The cache that a prefetched line stays in, in LLVM's numbers."""

    L1 = 0  # and in no other cache, until it is read
    L2 = 2


@cache
def read_once_cache() -> Cache:
    """The cache for data that a step reads once, on this CPU."""
    return choose_read_once_cache(l1_data_cache_bytes())


def choose_read_once_cache(num_bytes: int | None) -> Cache:
    """The same for an L1 data cache of so many bytes; None: not known."""
    return Cache.L1 if num_bytes is not None and num_bytes >= _LARGE_BYTES else Cache.L2


def l1_data_cache_bytes(folder: Path = _CACHES) -> int | None:
    """Size of a core's L1 data cache in Linux's own files; None: it is not there.

    Args:
        folder: describes the caches of a core.
    """
    for each in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((each / name).read_text().strip() for name in _FILES)
        except OSError:
            continue
        if level == "1" and kind == "Data" and size.endswith("K") and size[:-1].isdecimal():
            return 1024 * int(size[:-1])
    return None


def prefetch(builder, address, target):
    """Prefetch a cache line; addresses that are not mapped are ignored."""
    byte = ir.IntType(8).as_pointer()
    number = [ir.Constant(I32, value) for value in (0, target, 1)]  # to be read; where to; data
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), (byte, I32, I32, I32))
    )
    builder.call(function, [builder.inttoptr(address, byte), *number])
