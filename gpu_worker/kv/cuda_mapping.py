"""Maps blocks into virtual memory on NVIDIA GPUs, by CUDA's virtual memory management API.

A block is one physical allocation, made at the start. All blocks are mapped twice: in order into
the pool, for copies and swaps, and into the space where sequences need them. What a kernel writes
at one address, later kernels of the stream read at the other.
"""

import ctypes
from typing import Any, Protocol

import torch

from gpu_worker.kv.mapping import AddressesRefused, MapError

_SUCCESS = 0


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def record(self) -> None:
        """Mark the work that is queued now."""

    def synchronize(self) -> None:
        """Wait for the marked work."""


def load_driver() -> Any:
    """The module of CUDA's driver API.

    Raises:
        MapError: the package is not installed, or it finds no driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        needed = "virtual KV memory on GPUs needs the package cuda-bindings"
        raise MapError(f"{needed} (pip install cuda-bindings): {error}") from error
    return driver


class CudaMapper:
    """A ``Mapper`` for NVIDIA GPUs.

    Args:
        driver: ``cuda.bindings.driver``.
        events: mark queued work, used alternately.
        device: the GPU.
        num_blocks: of physical memory.
        num_places: of addresses.
        block_bytes: size of both, a whole number of the driver's pages.

    Raises:
        AddressesRefused: the driver reserves fewer addresses; nothing was allocated.
        MapError: the GPU has not enough memory.
    """

    max_mappings = None

    def __init__(
        self,
        driver: Any,
        events: tuple[Event, Event],
        device: torch.device,
        num_blocks: int,
        num_places: int,
        block_bytes: int,
    ) -> None:
        self._driver = driver
        # While a step computes, another thread may map for the next one. That thread unmaps only
        # what this step does not read, so it waits only for the steps before: `_past` marks them
        # and is not recorded anew until the next step begins.
        self._past, self._latest = events
        self._is_recorded = False
        self._block_bytes = block_bytes
        self._handles: list[Any] = []
        self._reserved: list[tuple[int, int]] = []  # address, size
        self._mapped: set[int] = set()  # addresses of blocks
        device_index = device.index or 0
        try:
            self._space = self._reserve(num_places)  # first: it may have to be tried with fewer
            pool = self._reserve(num_blocks)
            properties = _properties(driver, device_index)
            for _ in range(num_blocks):
                (handle,) = self._call("cuMemCreate", block_bytes, properties, 0)
                self._handles.append(handle)
            self._access = _access(driver, device_index)
            self._map(pool, 0, num_blocks)
        except MapError:
            self.close()
            raise
        self.pool = bytes_at(pool, num_blocks * block_bytes, device)
        self.space = bytes_at(self._space, num_places * block_bytes, device)

    def map(self, place: int, block: int, count: int) -> None:
        self.unmap(place, count)
        self._map(self._address(place), block, count)

    def unmap(self, place: int, count: int) -> None:
        addresses = [self._address(place + index) for index in range(count)]
        present = [address for address in addresses if address in self._mapped]
        if present:
            self._past.synchronize()  # unmapping is not ordered with the stream
        for address in present:
            self._mapped.discard(address)
            self._call("cuMemUnmap", address, self._block_bytes)

    def begin_step(self) -> None:
        if self._is_recorded:
            self._past, self._latest = self._latest, self._past
            self._is_recorded = False

    def mark_queued(self) -> None:
        self._latest.record()
        self._is_recorded = True

    def close(self) -> None:
        self.begin_step()
        if self._mapped:
            self._past.synchronize()
        for address in sorted(self._mapped):
            self._call("cuMemUnmap", address, self._block_bytes)
        self._mapped.clear()
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._handles.clear()
        for address, size in self._reserved:
            self._call("cuMemAddressFree", address, size)
        self._reserved.clear()

    def _map(self, address: int, block: int, count: int) -> None:
        """Map blocks at addresses where nothing is mapped."""
        done = []
        try:
            for index in range(count):
                at = address + index * self._block_bytes
                handle = self._handles[block + index]
                self._call("cuMemMap", at, self._block_bytes, 0, handle, 0)
                done.append(at)
            self._call("cuMemSetAccess", address, count * self._block_bytes, [self._access], 1)
        except MapError:
            for at in done:
                self._call("cuMemUnmap", at, self._block_bytes)
            raise
        self._mapped.update(done)

    def _reserve(self, num_blocks: int) -> int:
        size = num_blocks * self._block_bytes
        try:
            (address,) = self._call("cuMemAddressReserve", size, 0, 0, 0)
        except MapError as error:
            raise AddressesRefused(f"{error} ({size} bytes of addresses)") from error
        self._reserved.append((int(address), size))
        return int(address)

    def _address(self, place: int) -> int:
        return self._space + place * self._block_bytes

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return _call(self._driver, name, *arguments)


def page_bytes(driver: Any, device_index: int) -> int:
    """Allocation granularity of the driver, in bytes.

    Raises:
        MapError: the driver call failed.
    """
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    properties = _properties(driver, device_index)
    (found,) = _call(driver, "cuMemGetAllocationGranularity", properties, flag)
    return int(found)


def _call(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Results of one call of the driver, without the status; raises MapError if it failed."""
    status, *results = getattr(driver, name)(*arguments)
    if int(status) != _SUCCESS:
        raise MapError(f"{name}: {getattr(status, 'name', status)}")
    return tuple(results)


def _properties(driver: Any, device_index: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device_index
    return properties


def _access(driver: Any, device_index: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device_index
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    """A DLPack tensor without a deleter."""

    _fields_ = (
        ("tensor", _DLTensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Bytes [size] from an address on, mapped or not; the caller keeps the addresses reserved."""
    shape = (ctypes.c_int64 * 1)(size)
    managed = _DLManagedTensor(
        _DLTensor(
            data=address,
            device_type=_DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            ndim=1,
            type_code=_UNSIGNED,
            type_bits=8,
            type_lanes=1,
            shape=shape,
        )
    )
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    # torch reads the description again when the last view is dropped, to look for a deleter. So it
    # is never freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))
    capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found
