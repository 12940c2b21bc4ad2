"""Collectives of ranks on one machine, through memory that they share.

A decode step has two sums of a few KiB for each layer. Through the loopback device each of them
wakes threads of both processes, which takes longer than the layer. Here a rank writes its numbers
into a file in memory, counts, and reads the others' (`kernels/cpu/elementwise/rank_sum_kernel.py`).

Each rank holds a lock of its byte of the file, which the kernel releases when its process ends: so
a rank that waits finds out that another one is gone.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import randbits

import torch

from gpu_worker.ranks.collectives import Collectives, SumTotals
from gpu_worker.ranks.member import GroupOver, Member
from kernels.cpu.elementwise import rank_sum_kernel as fields
from kernels.cpu.elementwise.rank_sum_kernel import (
    RANK_SUM_LAYOUT,
    rank_gather_kernel,
    rank_sum_kernel,
    segment_bytes,
)
from kernels.cpu.runtime.entry_points import Kernel
from kernels.cpu.runtime.thread_team import ThreadTeam, find_clock_gettime, find_sched_yield
from shared.logs import EventLog

_FOLDER = Path("/dev/shm")
_POLL_S = 0.0002
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_INT64S = ctypes.c_int64 * RANK_SUM_LAYOUT.num_fields
_STATE = ctypes.c_int64 * fields.STATE_FIELDS

log = EventLog(__name__)


def share_memory(collectives: Collectives) -> Collectives:
    """Collectives through shared memory, if all ranks of a group have it; else the given ones.

    Raises:
        GroupOver: a rank is gone or late.
    """
    member = collectives.member
    name = f"pagestream-{collectives.gather([randbits(62)])[0][0]:016x}"
    segment, reason = None, ""
    try:
        # Rank 0 makes the file before the others open it.
        for opens in (member.rank == 0, member.rank != 0):
            if opens:
                try:
                    segment = _Segment(name, member)
                except (AttributeError, OSError) as error:  # AttributeError: no such locks here
                    reason = str(error)
            collectives.gather([0])
        everywhere = all(has for (has,) in collectives.gather([int(segment is not None)]))
    finally:
        if member.rank == 0:
            (_FOLDER / name).unlink(missing_ok=True)
    if segment is not None and everywhere:
        log.info("ranks share memory", group=member.group, bytes=segment_bytes(member.num_ranks))
        return SharedCollectives(collectives, segment)
    if segment is not None:
        segment.close()
    log.info("ranks share no memory", group=member.group, reason=reason or "another rank has none")
    return collectives


class SharedCollectives:
    """Sums and exchanges of numbers through shared memory; the rest through other collectives.

    Args:
        inner: of the same group.
        segment: that all ranks have opened.

    Attributes:
        failure: of the first exchange that failed; later ones return at once.
    """

    def __init__(self, inner: Collectives, segment: "_Segment") -> None:
        self.failure: GroupOver | None = None
        self._inner = inner
        self._segment = segment
        self._deadline_s = 600.0
        self._team = ThreadTeam()
        self._state = _STATE()
        self._callback = _FUNCTION(self._wait_long)  # kept, since kernels have its address
        self._args = _INT64S()
        self._args[fields.SEGMENT] = segment.address
        self._args[fields.RANK] = self.member.rank
        self._args[fields.NUM_RANKS] = self.member.num_ranks
        self._args[fields.LONG_WAIT] = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self._args[fields.STATE] = ctypes.addressof(self._state)
        self._args[fields.CLOCK] = find_clock_gettime()
        self._args[fields.SCHED_YIELD] = find_sched_yield()

    @property
    def member(self) -> Member:
        """This rank and its group."""
        return self._inner.member

    @property
    def totals(self) -> SumTotals:
        """Of all sums so far."""
        nanoseconds, count, num_bytes = self._state[fields.NANOSECONDS : fields.SUM_BYTES + 1]
        return SumTotals(nanoseconds / 1e9, count, num_bytes)

    def sum(self, x: torch.Tensor) -> None:
        """Replace a float32 tensor by its sum over all ranks: the same bits on each.

        Raises:
            GroupOver: a rank is gone or late.
        """
        self.add(x, x)
        if self.failure is not None:
            raise self.failure

    def add(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """out = the sum of all ranks' partial outputs in their order, rounded once.

        Both are contiguous. It may be captured; a failure is kept and not raised.
        """
        kernel = rank_sum_kernel(partial.dtype, out.dtype)
        self._run(kernel, partial.data_ptr(), out.data_ptr(), partial.numel())

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        self._inner.broadcast(x)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, as many on all of them.

        Raises:
            GroupOver: a rank is gone or late.
        """
        size = len(numbers)
        own = (ctypes.c_int64 * size)(*numbers)
        found = (ctypes.c_int64 * (size * self.member.num_ranks))()
        addresses = ctypes.addressof(own), ctypes.addressof(found)
        self._run(rank_gather_kernel(), *addresses, ctypes.sizeof(own))
        if self.failure is not None:
            raise self.failure
        return [found[begin : begin + size] for begin in range(0, len(found), size)]

    def set_deadline(self, seconds: float) -> None:
        """The longest time that a call may take from now on."""
        self._deadline_s = seconds
        self._inner.set_deadline(seconds)

    def close(self) -> None:
        """Leave the group: calls of the other ranks fail at once."""
        self._segment.close()
        self._inner.close()

    def _run(self, kernel: Kernel, source: int, target: int, size: int) -> None:
        args = self._args
        args[0] = args[1] = 0
        args[fields.INPUT], args[fields.OUTPUT], args[fields.ELEMENTS] = source, target, size
        self._team.run(kernel, ctypes.addressof(args), 1)

    def _wait_long(self, _: int) -> None:
        """Called by a kernel, on any thread: wait until all ranks have counted as far as this."""
        began_s = time.monotonic()
        while late := self._segment.late():
            reason = ""
            if gone := [rank for rank in late if self._segment.is_gone(rank)]:
                if gone[0] not in self._segment.late():  # it counted before it left
                    continue
                reason = f"rank {gone[0]} is gone"
            elif time.monotonic() - began_s > self._deadline_s:
                reason = f"Timed out: rank {late[0]} is more than {self._deadline_s:g} s late"
            if reason:
                where = f"rank {self.member.rank} of group {self.member.group}"
                self.failure = GroupOver(f"{where}: an exchange failed: {reason}")
                self._state[fields.FAILED] = 1
                return
            time.sleep(_POLL_S)  # memory of another process can only be polled


class _Segment:
    """A file in memory that the ranks of a group have mapped. Rank 0 makes it.

    Args:
        name: of the file.
        member: of this process.

    Raises:
        OSError: there is no room, or not this file.
    """

    def __init__(self, name: str, member: Member) -> None:
        self._member = member
        size = segment_bytes(member.num_ranks)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if member.rank == 0 else 0)
        self._file = os.open(_FOLDER / name, flags, 0o600)
        try:
            self._lock(fcntl.F_WRLCK)
            if member.rank == 0:
                os.posix_fallocate(self._file, 0, size)  # else a full folder would kill by SIGBUS
            self._memory = mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            raise
        self._counters = (ctypes.c_int64 * (size // 8)).from_buffer(self._memory)
        self.address = ctypes.addressof(self._counters)

    def late(self) -> list[int]:
        """The ranks that have counted less than this one."""
        own = self._counter(self._member.rank)
        return [rank for rank in self._member.peers if self._counter(rank) < own]

    def is_gone(self, rank: int) -> bool:
        """Whether a rank's process has ended or closed its segment."""
        wanted = _lock_of(rank, fcntl.F_WRLCK)
        kind, *_ = struct.unpack(_LOCK, fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, wanted))
        return bool(kind == fcntl.F_UNLCK)

    def close(self) -> None:
        """Release this rank's lock. The memory stays mapped, since kernels may use it."""
        if self._file >= 0:
            with suppress(OSError):
                self._lock(fcntl.F_UNLCK)
            os.close(self._file)
        self._file = -1

    def _lock(self, kind: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock_of(self._member.rank, kind))

    def _counter(self, rank: int) -> int:
        return int(self._counters[rank * fields.COUNTER_BYTES // 8])


_LOCK = "hhqqi"  # struct flock


def _lock_of(rank: int, kind: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, rank, 1, 0)
