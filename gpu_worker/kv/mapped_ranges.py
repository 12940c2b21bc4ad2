"""Keeps track of the blocks that are mapped into each sequence's range of addresses."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpu_worker.kv.mapping import MapError, Mapper, MappingFailed

_NONE = -1
_FIRST_CAPACITY = 64

Table = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


class MappedRanges:
    """One range of places per batch slot, which holds the blocks of its sequence in order.

    Blocks of a sequence that has left stay mapped, because no kernel reads them. The next sequence
    in the slot replaces only those that differ (deferred reclamation; vAttention, section 6.1.2).
    When the system allows no more mappings, the ranges that were not used for longest are unmapped.

    Args:
        mapper: maps physical blocks to places.
        num_ranges: most resident sequences.
        max_blocks: blocks in a range.
        num_blocks: physical blocks.
        first_place: where the first range begins.
    """

    def __init__(
        self,
        mapper: Mapper,
        num_ranges: int,
        max_blocks: int,
        num_blocks: int,
        first_place: int = 0,
    ) -> None:
        self.num_ranges = num_ranges
        self._first_place = first_place
        self._mapper = mapper
        self._max_blocks = max_blocks
        self._step = 0
        self._in_use: int | None = 0
        self._references = np.zeros(num_blocks, np.int32)  # resident sequences with this block
        capacity = min(_FIRST_CAPACITY, num_ranges)
        self._blocks: Table = np.full((capacity, max_blocks), _NONE, np.int32)  # mapped blocks
        self._lengths = np.zeros(capacity, np.int64)  # blocks of the resident sequence
        self._extents = np.zeros(capacity, np.int64)  # no block is mapped from this column on
        self._areas = np.zeros(capacity, np.int64)  # mappings of the operating system, at most
        self._last_used = np.zeros(capacity, np.int64)  # step
        self._blocks_in_step = np.zeros(capacity, np.int64)  # blocks that the last step may use

    @property
    def num_in_use(self) -> int:
        """Physical blocks of resident sequences; shared ones count once."""
        if self._in_use is None:
            self._in_use = int(np.count_nonzero(self._references))
        return self._in_use

    @property
    def num_areas(self) -> int:
        """Mappings that the operating system keeps for all ranges, at most."""
        return int(self._areas.sum())

    def mapped(self, slot: int) -> list[int]:
        """Blocks that are mapped in a range, those of earlier sequences included; -1: none."""
        return self._blocks[slot, : self._extents[slot]].tolist() if slot < len(self._areas) else []

    def keep(self, taken: npt.NDArray[np.bool_]) -> None:
        """Drop the sequences in slots that are not ``taken`` [n]; their blocks stay mapped."""
        gone = self._lengths > 0
        num_known = min(len(gone), len(taken))
        gone[:num_known] &= ~taken[:num_known]
        for slot in np.flatnonzero(gone).tolist():
            self._drop_references(slot)

    def map_tables(self, slots: Indices, tables: Table, num_blocks: Indices) -> None:
        """Map the blocks tables[s, :num_blocks[s]] into the ranges of ``slots`` [S].

        Raises:
            MappingFailed: not all of them can be mapped; the records match what is mapped, and
                other sequences keep their blocks.
        """
        self._mapper.begin_step()
        self._step += 1
        self._make_room(int(slots.max(initial=-1)) + 1)
        self._last_used[slots] = self._step
        self._blocks_in_step[slots] = num_blocks
        width = tables.shape[1]
        known = np.take(self._blocks[:, :width], slots, axis=0)
        changed = (tables != known) & (np.arange(width) < num_blocks[:, None])
        touched = changed.any(1) | (num_blocks != self._lengths[slots])
        for row in np.flatnonzero(touched).tolist():
            self._update(int(slots[row]), tables[row, : num_blocks[row]])

    def premap(self, slots: Indices, tables: Table, num_blocks: Indices) -> None:
        """Map blocks that ``map_tables`` will need, without an effect on the step under way.

        This leaves out places that the last step may still use, even those of sequences that have
        left, ranges that do not exist yet, and blocks for which another range would have to be
        unmapped. Blocks that cannot be mapped are left out as well.
        """
        width = min(tables.shape[1], self._max_blocks)
        exist = (slots < len(self._areas)) & (num_blocks <= width)
        slots, tables, num_blocks = slots[exist], tables[exist, :width], num_blocks[exist]
        column = np.arange(width)
        changed = (tables != self._blocks[slots, :width]) & (column < num_blocks[:, None])
        in_use = np.where(self._last_used[slots] == self._step, self._blocks_in_step[slots], 0)
        changed &= column >= in_use[:, None]
        for row in np.flatnonzero(changed.any(1)).tolist():
            slot, columns = int(slots[row]), np.flatnonzero(changed[row])
            if not self._has_areas(2 * len(columns) + 2):
                return
            if columns[0] < self._lengths[slot]:
                self._drop_references(slot)  # it leaves, or is mapped anew when it computes
            try:
                self._remap(slot, columns, tables[row, columns])
            except MappingFailed:
                return  # the plan itself will fail, with this reason

    def _has_areas(self, num_more: int) -> bool:
        limit = self._mapper.max_mappings
        return limit is None or self.num_areas + num_more <= limit

    def _update(self, slot: int, table: Table) -> None:
        columns = np.flatnonzero(table != self._blocks[slot, : len(table)])
        length = int(self._lengths[slot])
        if len(table) < length or (len(columns) and columns[0] < length):
            self._drop_references(slot)  # another sequence, or a replaced block
            length = 0
        if len(columns):
            self._remap(slot, columns, table[columns])
        self._lengths[slot] = len(table)
        self._count(table[length:], 1)

    def _remap(self, slot: int, columns: Indices, blocks: Table) -> None:
        """Map blocks [n] at columns [n] of a range, contiguous runs with one call."""
        self._extents[slot] = extent = max(int(self._extents[slot]), int(columns[-1]) + 1)
        row = self._blocks[slot, :extent]
        planned = row.copy()
        planned[columns] = blocks
        num_areas = _num_areas(planned)
        self._make_areas(num_areas - int(self._areas[slot]))
        first = self._place(slot)
        try:
            for column, block, count in _runs(columns.tolist(), blocks.tolist()):
                row[column : column + count] = _NONE  # until the call has succeeded
                self._mapper.map(first + column, block, count)
                row[column : column + count] = planned[column : column + count]
        except MapError as error:
            num_areas = _num_areas(row)
            where = f"blocks [{column}, {column + count}) of the sequence in slot {slot}"
            raise MappingFailed(f"{where} cannot be mapped: {error}") from error
        finally:
            self._areas[slot] = num_areas

    def _make_areas(self, num_more: int) -> None:
        """Unmap idle ranges until the system can keep that many mappings more."""
        limit = self._mapper.max_mappings
        if limit is None:
            return
        excess = self.num_areas + num_more - limit
        idle = np.flatnonzero((self._areas > 0) & (self._last_used < self._step))
        order = np.lexsort((self._last_used[idle], self._lengths[idle] > 0))
        for slot in idle[order].tolist():
            if excess <= 0:
                return
            excess -= int(self._areas[slot])
            self._unmap(slot)
        if excess > 0:
            raise MappingFailed(
                f"{limit + excess} areas of memory would have to be mapped, and the system allows "
                f"{limit}: use a larger --block-size or raise vm.max_map_count"
            )

    def _unmap(self, slot: int) -> None:
        extent = int(self._extents[slot])
        self._mapper.unmap(self._place(slot), extent)
        self._drop_references(slot)  # if it is still resident, it is mapped anew when it computes
        self._blocks[slot, :extent] = _NONE
        self._extents[slot] = self._areas[slot] = 0

    def _place(self, slot: int) -> int:
        """The first place of a range."""
        return self._first_place + slot * self._max_blocks

    def _drop_references(self, slot: int) -> None:
        self._count(self._blocks[slot, : self._lengths[slot]], -1)
        self._lengths[slot] = 0

    def _count(self, blocks: Table, change: int) -> None:
        np.add.at(self._references, blocks, change)
        self._in_use = None

    def _make_room(self, num_slots: int) -> None:
        if num_slots > self.num_ranges:
            raise MappingFailed(
                f"{num_slots} sequences at a time are more than the {self.num_ranges} ranges of "
                "addresses that are reserved"
            )
        while num_slots > (capacity := len(self._areas)):
            more = min(capacity, self.num_ranges - capacity)
            self._blocks = np.pad(self._blocks, ((0, more), (0, 0)), constant_values=_NONE)
            self._lengths = np.pad(self._lengths, (0, more))
            self._extents = np.pad(self._extents, (0, more))
            self._areas = np.pad(self._areas, (0, more))
            self._last_used = np.pad(self._last_used, (0, more))
            self._blocks_in_step = np.pad(self._blocks_in_step, (0, more))


def _num_areas(row: Table) -> int:
    """Mappings that a range takes, at most: a contiguous run of blocks is one."""
    return int(np.count_nonzero(np.diff(row) != 1)) + 2  # and one for the rest of the range


def _runs(columns: list[int], blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive columns that hold consecutive blocks: first column, block, count."""
    first = 0
    for index in range(1, len(columns) + 1):
        size = index - first
        if (
            index == len(columns)
            or columns[index] != columns[first] + size
            or blocks[index] != blocks[first] + size
        ):
            yield columns[first], blocks[first], size
            first = index
