"""The memory calls of CUDA's driver without a GPU; checks and records every call."""

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

PAGE_BYTES = 2 * 2**20


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass
class FakeDriver:
    """Refuses what a real driver refuses; ``calls`` has the calls in order.

    Attributes:
        most_handles: physical memory, in allocations.
        most_addresses: bytes that one reservation may have.
        refused: names of calls that fail from now on.
    """

    most_handles: int = 1_000
    most_addresses: int = 2**60
    refused: set[str] = field(default_factory=set)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    handles: dict[int, int] = field(default_factory=dict)  # size
    reserved: dict[int, int] = field(default_factory=dict)  # address: size
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: size, handle
    accessible: set[int] = field(default_factory=set)
    unfinished: list["FakeEvent"] = field(default_factory=list)  # queued work, in order
    reads: set[int] | None = None  # addresses that it may read; None: any

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def CUmemAllocationProp(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[Status, int]:  # noqa: N802
        assert (properties.type, properties.location.type, flag) == (1, 1, 0)
        return Status.CUDA_SUCCESS, PAGE_BYTES

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Status, int]:  # noqa: N802
        if len(self.handles) == self.most_handles:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        assert size % PAGE_BYTES == 0
        handle = 1 + len(self.calls)
        self.handles[handle] = size
        return self._note("create", handle), handle

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Status, int]:
        assert size % PAGE_BYTES == alignment == address == flags == 0
        if size > self.most_addresses:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        found = (1 + len(self.reserved)) << 44
        self.reserved[found] = size
        return self._note("reserve", found), found

    def cuMemMap(  # noqa: N802
        self, address: int, size: int, offset: int, handle: int, flags: int
    ) -> tuple[Status]:
        if "map" in self.refused:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        assert offset == flags == 0
        assert size == self.handles[handle]
        assert any(at <= address < at + room for at, room in self.reserved.items())
        assert address not in self.mapped, "something is mapped there"
        self.mapped[address] = (size, handle)
        return (self._note("map", address, handle),)

    def cuMemSetAccess(  # noqa: N802
        self, address: int, size: int, access: list[Any], count: int
    ) -> tuple[Status]:
        if "access" in self.refused:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        assert count == len(access) == 1
        end = address + size
        while address < end:
            self.accessible.add(address)
            address += self.mapped[address][0]
        return (self._note("access", address),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Status]:  # noqa: N802
        reads = self.reads is None or address in self.reads
        assert not (self.unfinished and reads), "queued work may still read it"
        assert self.mapped.pop(address)[0] == size
        self.accessible.discard(address)
        return (self._note("unmap", address),)

    def cuMemRelease(self, handle: int) -> tuple[Status]:  # noqa: N802
        assert all(mapped != handle for _, mapped in self.mapped.values())
        del self.handles[handle]
        return (self._note("release", handle),)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Status]:  # noqa: N802
        assert self.reserved.pop(address) == size
        return (self._note("free", address),)

    def _note(self, *call: Any) -> Status:
        self.calls.append(call)
        return Status.CUDA_SUCCESS


class FakeEvent:
    """Marks the work that was queued when it was recorded last."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def record(self) -> None:
        """Queue work."""
        assert self not in self._driver.unfinished, "a waiting call may still need what it marked"
        self._driver.unfinished.append(self)

    def synchronize(self) -> None:
        """Complete this work and all work before it."""
        unfinished = self._driver.unfinished
        if self in unfinished:
            del unfinished[: unfinished.index(self) + 1]
