"""Takes a pool's physical memory ahead of need (CPU).

The system gives a page, zeroed, when it is touched first; for a prompt over blocks that nobody has
used yet that was a sixth of the time on a virtual machine. A start that touched them all would take
seconds longer. So pages are taken when the worker has nothing to do.
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

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; what pages hold stays
_PIECE_BYTES = 2**20  # takes a millisecond, for which a plan may have to wait
_BETWEEN_S = 0.001
_WHILE_BUSY_S = 0.05
# The pool may be larger than what it will ever use: others come first.
_LEFT_BYTES = 2**30
_LOOK_EVERY = 64  # pieces

log = EventLog(__name__)


async def populate(caches: Iterable[LayerCache], is_busy: Callable[[], bool]) -> None:
    """Take the memory of these caches, piece by piece, whenever there is nothing else to do.

    Args:
        caches: of a pool on the CPU; they outlive this.
        is_busy: whether there is.
    """
    if sys.platform != "linux":
        return
    began_s, num_bytes = time.monotonic(), 0
    for number, (address, size) in enumerate(_pieces(caches)):
        while is_busy():  # noqa: ASYNC110 - an event would cost something in every step
            await asyncio.sleep(_WHILE_BUSY_S)
        if number % _LOOK_EVERY == 0 and available_memory() < _LEFT_BYTES:
            log.info("the KV pool's other memory is taken when needed", taken_bytes=num_bytes)
            return
        if not _touch(address, size):
            return
        num_bytes += size
        await asyncio.sleep(_BETWEEN_S)
    seconds = round(time.monotonic() - began_s, 1)
    log.info("the KV pool's memory is taken", bytes=num_bytes, seconds=seconds)


def _pieces(caches: Iterable[LayerCache]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes; of every allocation a piece at a time, as low blocks are used first."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for storage in (cache.key.untyped_storage(), cache.value.untyped_storage())
    }
    for begin in range(0, max(storages.values(), default=0), _PIECE_BYTES):
        for address, num_bytes in storages.items():
            if begin < num_bytes:
                yield address + begin, min(_PIECE_BYTES, num_bytes - begin)


def _touch(address: int, size: int) -> bool:
    """Whether the system can do that."""
    skipped = address % mmap.PAGESIZE  # of a page that is there anyway
    if _libc.madvise(address - skipped, size + skipped, _MADV_POPULATE_WRITE) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    log.debug("the KV pool's memory is taken when needed", because=reason)
    return False


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
