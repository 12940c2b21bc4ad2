"""Prefaults a pool on the CPU: takes its physical memory ahead of need.

The system zeroes a page when it is touched first. For a prompt over unused blocks these page faults
were a sixth of the time on a virtual machine; touching all pages at the start would take seconds.
So pages are touched while the worker is idle.
"""

import asyncio
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from gpu_worker.kv.pool_sizes import available_memory
from kernels.interface import LayerCache
from shared.logs import EventLog

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; keeps the contents of pages
_PIECE_BYTES = 2**20  # takes about a millisecond, by which a plan may be delayed
_BETWEEN_S = 0.001
_WHILE_BUSY_S = 0.05
# The pool may be larger than it ever needs to be, so this much is left for other processes.
_LEFT_BYTES = 2**30
_CHECK_EVERY = 64  # pieces

log = EventLog(__name__)


async def prefault(caches: Iterable[LayerCache], is_busy: Callable[[], bool]) -> None:
    """Touch the memory of a pool piece by piece while the worker is idle.

    Args:
        caches: of a pool on the CPU; they must outlive this coroutine.
        is_busy: whether a step is under way.
    """
    if sys.platform != "linux":
        return
    began_s, num_bytes = time.monotonic(), 0
    for number, (address, size) in enumerate(_pieces(caches)):
        while is_busy():  # noqa: ASYNC110 - an event would cost time in every step
            await asyncio.sleep(_WHILE_BUSY_S)
        if number % _CHECK_EVERY == 0 and available_memory() < _LEFT_BYTES:
            log.info("the KV pool's other memory is taken when needed", taken_bytes=num_bytes)
            return
        if not _touch(address, size):
            return
        num_bytes += size
        await asyncio.sleep(_BETWEEN_S)
    seconds = round(time.monotonic() - began_s, 1)
    log.info("the KV pool's memory is taken", bytes=num_bytes, seconds=seconds)


def _pieces(caches: Iterable[LayerCache]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of pieces, low blocks of all allocations first: they are used first."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for storage in (each.untyped_storage() for each in cache.tensors)
    }
    for begin in range(0, max(storages.values(), default=0), _PIECE_BYTES):
        for address, num_bytes in storages.items():
            if begin < num_bytes:
                yield address + begin, min(_PIECE_BYTES, num_bytes - begin)


def _touch(address: int, size: int) -> bool:
    """Touch the pages of a piece; False if the system does not support it."""
    skipped = address % mmap.PAGESIZE  # bytes of the first page before the piece
    if _libc.madvise(address - skipped, size + skipped, _MADV_POPULATE_WRITE) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    log.debug("the KV pool's memory is taken when needed", because=reason)
    return False


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
