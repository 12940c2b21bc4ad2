"""Maps blocks into virtual memory on CPUs: the pool is a memory file, mapped piece by piece."""

import ctypes
import os
import weakref
from pathlib import Path

import torch

from gpu_worker.kv.mapping import MapError

PAGE_BYTES = os.sysconf("SC_PAGESIZE")

# From Linux's sys/mman.h; Python's mmap module supports no fixed addresses.
_PROT_NONE, _PROT_READ_WRITE = 0x0, 0x3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_RESERVED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

# Mappings that threads, libraries and allocations of this process may still need.
_OTHER_MAPPINGS = 4_096

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def spare_mappings() -> int:
    """Mappings that this process may have beyond those that it needs for other purposes."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open() as maps:
            present = sum(1 for _ in maps)
    except OSError as error:
        raise MapError(f"virtual KV memory needs Linux's /proc: {error}") from error
    return max(0, limit - present - _OTHER_MAPPINGS)


class CpuMapper:
    """A ``Mapper`` for CPUs.

    Physical memory is taken when a block is first mapped or written, and kept.

    Args:
        num_blocks: of physical memory.
        num_places: of addresses.
        block_bytes: size of both, a whole number of pages.
        max_mappings: that the space may take.

    Raises:
        MapError: the system has not enough memory or addresses.
    """

    def __init__(
        self, num_blocks: int, num_places: int, block_bytes: int, max_mappings: int
    ) -> None:
        assert block_bytes % PAGE_BYTES == 0, (block_bytes, PAGE_BYTES)
        if not hasattr(os, "memfd_create"):
            raise MapError("virtual KV memory needs Linux: there is no memfd_create here")
        self.max_mappings = max_mappings
        self._block_bytes = block_bytes
        self._file = os.memfd_create("pagestream-kv")
        weakref.finalize(self, os.close, self._file)  # mappings outlive the descriptor
        try:
            os.ftruncate(self._file, num_blocks * block_bytes)
        except OSError as error:
            raise MapError(f"{num_blocks} blocks of {block_bytes} bytes: {error}") from error
        pool_bytes, space_bytes = num_blocks * block_bytes, num_places * block_bytes
        self.pool = _tensor(
            _map(None, pool_bytes, _PROT_READ_WRITE, _MAP_SHARED, self._file), pool_bytes
        )
        self._space = _map(None, space_bytes, _PROT_NONE, _RESERVED, -1)
        self.space = _tensor(self._space, space_bytes)

    def map(self, place: int, block: int, count: int) -> None:
        # MAP_POPULATE: a page fault for every page would cost more than this call.
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        size, offset = count * self._block_bytes, block * self._block_bytes
        try:
            _map(self._address(place), size, _PROT_READ_WRITE, flags, self._file, offset)
        except MapError:
            self.unmap(place, count)
            raise

    def unmap(self, place: int, count: int) -> None:
        size = count * self._block_bytes
        # The addresses stay reserved. If even this fails, they stay mapped as they are.
        _mmap(self._address(place), size, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)

    def begin_step(self) -> None:
        pass

    def mark_queued(self) -> None:
        pass  # CPU kernels have ended when their call returns

    def close(self) -> None:
        pass  # memory and addresses are freed with the last tensor

    def _address(self, place: int) -> int:
        return self._space + place * self._block_bytes


def _map(
    address: int | None, size: int, protection: int, flags: int, file: int, offset: int = 0
) -> int:
    found: int | None = _mmap(address, size, protection, flags, file, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise MapError(f"the system does not map {size} bytes: {os.strerror(code)}")
    return found


def _tensor(address: int, size: int) -> torch.Tensor:
    """Bytes [size] from an address on, which are unmapped with the last view of them."""
    array = ctypes.c_uint8 * size
    kind: type[ctypes.Array[ctypes.c_uint8]] = type("MappedBytes", (array,), {})  # weakly referable
    memory = kind.from_address(address)
    weakref.finalize(memory, _munmap, address, size).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)
