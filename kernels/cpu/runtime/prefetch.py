"""Bringing memory into a core's caches ahead of its use: what emits LLVM IR for that, and where to.

What is read once in a step, weights of a few rows and all keys and values, is many times the
caches: there it only takes the place of others' code and data. So it had best be in the fastest
cache alone, until it is read. But there it has to fit beside what is being read, twice a tile of
keys and values, and a core waits for fewer lines at a time on their way to the fastest cache than
to the second one.
"""

from enum import IntEnum
from functools import cache
from pathlib import Path

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.runtime.simd import I32

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TOLD = ("level", "type", "size")
# Of cores with 48 KB (Zen 5) the fastest cache was the better place, of those with 32 KB (Zen 4)
# the second: a sixth of the time of a step.
_LARGE_BYTES = 48 * 1024


class Cache(IntEnum):
    """Where a line that is brought in stays, in LLVM's numbers."""

    FASTEST = 0  # nowhere else, until it is read
    SECOND = 2


@cache
def for_read_once() -> Cache:
    """Where this CPU's cores had best have what is read once in a step."""
    return choose_for_read_once(fastest_cache_bytes())


def choose_for_read_once(num_bytes: int | None) -> Cache:
    """The same for a fastest cache of a size; None: not known."""
    return Cache.FASTEST if num_bytes is not None and num_bytes >= _LARGE_BYTES else Cache.SECOND


def fastest_cache_bytes(folder: Path = _CACHES) -> int | None:
    """Size of a core's fastest cache for data, as Linux tells it; None: it does not.

    Args:
        folder: of what the system knows of a core's caches.
    """
    for each in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((each / name).read_text().strip() for name in _TOLD)
        except OSError:
            continue
        if level == "1" and kind == "Data" and size.endswith("K") and size[:-1].isdecimal():
            return 1024 * int(size[:-1])
    return None


def prefetch(builder, address, target):
    """Start to bring a cache line in; any address will do."""
    byte = ir.IntType(8).as_pointer()
    number = [ir.Constant(I32, value) for value in (0, target, 1)]  # to be read; where to; data
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), (byte, I32, I32, I32))
    )
    builder.call(function, [builder.inttoptr(address, byte), *number])
