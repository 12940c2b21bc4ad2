"""Mapped ranges: what is skipped, kept, shared, unmapped, and the state after errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kv.mapped_ranges import MappedRanges
from gpu_worker.kv.mapping import MapError, MappingFailed

MAX_BLOCKS = 8
NUM_BLOCKS = 64


class NotedMapper:
    """Maps in a dictionary; refuses the given blocks."""

    pool = space = torch.empty(0)

    def __init__(self, max_mappings: int | None = None) -> None:
        self.max_mappings = max_mappings
        self.refused: set[int] = set()
        self.calls: list[tuple[int, int, int]] = []
        self.found: dict[int, int] = {}  # block by place

    def map(self, place: int, block: int, count: int) -> None:
        self.calls.append((place, block, count))
        for index in range(count):
            self.found.pop(place + index, None)
        if self.refused & set(range(block, block + count)):
            raise MapError("out of luck")
        for index in range(count):
            self.found[place + index] = block + index

    def unmap(self, place: int, count: int) -> None:
        for index in range(count):
            self.found.pop(place + index, None)

    def begin_step(self) -> None:
        pass

    def mark_queued(self) -> None:
        pass

    def close(self) -> None:
        pass

    def areas(self) -> int:
        """Mappings of a system: a run of consecutive blocks is one."""
        joined = sum(self.found.get(place - 1, -9) == b - 1 for place, b in self.found.items())
        return len(self.found) - joined


class Ranges(MappedRanges):
    """Ranges that map tables given as lists, by slot."""

    def __init__(self, mapper: NotedMapper, num_ranges: int = 100) -> None:
        super().__init__(mapper, num_ranges, MAX_BLOCKS, NUM_BLOCKS)
        self.mapper = mapper

    def see(self, **tables: list[int]) -> list[tuple[int, int, int]]:
        """Map tables ``s<slot>=[blocks]``; the calls: place, block, count."""
        self.mapper.calls.clear()
        slots, padded, lengths = expected(**tables)
        self.map_tables(slots, padded, lengths)
        for slot, blocks in zip(slots.tolist(), tables.values(), strict=True):
            assert self.at(slot)[: len(blocks)] == blocks
        assert self.mapper.areas() <= self.num_areas
        return self.mapper.calls

    def at(self, slot: int) -> list[int]:
        """Blocks in a range by the mapper's record; -1: none."""
        first = slot * MAX_BLOCKS
        return [self.mapper.found.get(first + column, -1) for column in range(MAX_BLOCKS)]

    def keep_only(self, *slots: int) -> None:
        taken = np.zeros(128, np.bool_)
        taken[list(slots)] = True
        self.keep(taken)


def test_neighbours_are_mapped_with_one_call() -> None:
    ranges = Ranges(NotedMapper())
    assert ranges.see(s2=[5, 6, 7, 3, 4, 9]) == [(16, 5, 3), (19, 3, 2), (21, 9, 1)]


def test_only_what_changed_is_mapped() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2], s1=[3])
    assert ranges.see(s0=[1, 2], s1=[3]) == []
    assert ranges.see(s0=[1, 2, 8], s1=[3]) == [(2, 8, 1)]  # growth
    assert ranges.see(s0=[1, 7, 8], s1=[3]) == [(1, 7, 1)]  # copy-on-write


def test_what_a_sequence_leaves_behind_serves_the_next_one_in_its_slot() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2, 3, 4])
    ranges.keep_only()
    assert ranges.num_in_use == 0
    assert ranges.at(0)[:4] == [1, 2, 3, 4]
    assert ranges.see(s0=[1, 2, 9]) == [(2, 9, 1)]  # a cached prefix of two blocks
    assert ranges.num_in_use == 3
    assert ranges.see(s0=[1, 2, 9, 4]) == []
    assert ranges.num_in_use == 4


def test_a_shared_block_counts_once_until_its_last_owner_is_gone() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2, 3], s1=[1, 2, 4], s5=[1])
    assert ranges.num_in_use == 4
    ranges.keep_only(1, 5)
    assert ranges.num_in_use == 3
    ranges.see(s1=[1, 2, 4], s5=[1, 6])
    ranges.keep_only(5)
    assert ranges.num_in_use == 2
    ranges.keep_only()
    assert ranges.num_in_use == 0


def test_a_slot_that_changed_hands_within_a_plan_is_counted_right() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2, 3])
    ranges.keep_only(0)
    ranges.see(s0=[5])
    assert ranges.num_in_use == 1


def test_slots_beyond_the_first_ones_get_ranges_while_there_are_any() -> None:
    ranges = Ranges(NotedMapper(), num_ranges=90)
    ranges.see(s3=[1], s70=[2])
    ranges.see(s89=[3])
    assert ranges.num_in_use == 3
    with pytest.raises(MappingFailed, match="91 sequences at a time are more than the 90 ranges"):
        ranges.see(s90=[4])
    ranges.see(s3=[1, 5])


def test_a_failed_mapping_is_reported_and_leaves_other_ranges_alone() -> None:
    mapper = NotedMapper()
    ranges = Ranges(mapper)
    ranges.see(s0=[1, 2], s1=[3, 4])
    mapper.refused = {10}
    with pytest.raises(MappingFailed, match=r"blocks \[1, 3\) of the sequence in slot 1.*luck"):
        ranges.see(s1=[5, 9, 10])
    assert ranges.at(0)[:2] == [1, 2]
    assert ranges.at(1)[:3] == [5, -1, -1]
    assert ranges.mapped(1) == [5, -1, -1]
    mapper.refused.clear()
    assert ranges.see(s0=[1, 2]) == []
    assert ranges.see(s1=[5, 9, 10]) == [(9, 9, 2)]
    assert ranges.num_in_use == 5


def test_unused_ranges_are_unmapped_when_mappings_run_out() -> None:
    mapper = NotedMapper(max_mappings=11)
    ranges = Ranges(mapper)
    ranges.see(s0=[1, 3, 5])
    ranges.see(s1=[2, 4, 6])
    ranges.see(s2=[7])
    ranges.keep_only(0, 2)
    ranges.see(s2=[7, 9, 11])  # slot 0 is unused for longer, but slot 1 has no sequence
    assert ranges.at(1) == [-1] * MAX_BLOCKS
    assert ranges.at(0)[:3] == [1, 3, 5]
    ranges.see(s3=[20, 22, 24])
    assert ranges.at(0) == [-1] * MAX_BLOCKS
    ranges.keep_only(0, 2, 3)
    ranges.see(s0=[1, 3, 5])  # it is mapped again


def test_more_mappings_than_the_system_allows_are_an_error_with_the_numbers() -> None:
    mapper = NotedMapper(max_mappings=14)
    ranges = Ranges(mapper)
    with pytest.raises(MappingFailed, match=r"areas .* allows 14: .*--block-size.*max_map_count"):
        ranges.see(s0=[1, 3, 5, 7], s1=[1, 3, 5, 7], s2=[1, 3, 5, 7])
    assert mapper.areas() <= 14
    ranges.keep_only()
    ranges.see(s0=[1, 3, 5, 7])
    ranges.see(s0=[1, 2, 3, 4, 5, 6, 7, 8])  # consecutive blocks take one mapping


def expected(**tables: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, padded tables and lengths of ``s<slot>=[blocks]``."""
    padded = np.full((len(tables), max(map(len, tables.values()))), -7, np.int32)
    for row, blocks in zip(padded, tables.values(), strict=True):
        row[: len(blocks)] = blocks
    slots = np.array([int(name[1:]) for name in tables])
    return slots, padded, np.array([len(blocks) for blocks in tables.values()])


def test_what_is_prepared_needs_no_mapping_later() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2], s1=[3])
    ranges.premap(*expected(s0=[1, 2, 8], s1=[3], s2=[5, 6]))
    assert ranges.num_in_use == 3
    assert ranges.see(s0=[1, 2, 8], s1=[3], s2=[5, 6]) == []
    assert ranges.num_in_use == 6


def test_what_runs_is_not_remapped_ahead_of_time() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2], s1=[3, 4])
    ranges.see(s0=[1, 2])
    ranges.premap(*expected(s0=[1, 7, 8], s1=[3, 9]))
    assert ranges.at(0)[:3] == [1, 2, 8]  # a copy on write has to wait for the step
    assert ranges.at(1)[:2] == [3, 9]
    assert ranges.see(s0=[1, 7, 8], s1=[3, 9]) == [(1, 7, 1)]


def test_what_was_prepared_for_nothing_leaves_nothing_wrong() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1, 2], s1=[3])
    ranges.premap(*expected(s0=[1, 2, 8, 9], s1=[3, 7], s2=[5, 6]))
    ranges.keep_only()  # as when an epoch ends
    assert ranges.num_in_use == 0
    ranges.see(s0=[1, 2, 9], s1=[4], s2=[5])
    assert ranges.num_in_use == 5
    ranges.keep_only()
    assert ranges.num_in_use == 0


def test_a_premapping_that_fails_has_no_effect() -> None:
    mapper = NotedMapper()
    ranges = Ranges(mapper)
    ranges.see(s0=[1, 2])
    mapper.refused = {10}
    ranges.premap(*expected(s0=[1, 2, 10], s1=[5]))
    ranges.see(s0=[1, 2], s1=[5])
    with pytest.raises(MappingFailed, match=r"blocks \[2, 3\) of the sequence in slot 0.*luck"):
        ranges.see(s0=[1, 2, 10])
    mapper.refused.clear()
    ranges.see(s0=[1, 2, 10], s1=[5])


def test_nothing_is_given_back_for_what_is_only_prepared() -> None:
    mapper = NotedMapper(max_mappings=12)
    ranges = Ranges(mapper)
    ranges.see(s0=[1, 3, 5])
    ranges.see(s1=[2, 4, 6])
    ranges.premap(*expected(s2=[7, 9, 11]))
    assert ranges.at(2) == [-1] * MAX_BLOCKS
    assert ranges.at(0)[:3] == [1, 3, 5]
    ranges.see(s2=[7, 9, 11])


def test_ranges_and_columns_that_are_not_there_are_left_out() -> None:
    ranges = Ranges(NotedMapper())
    ranges.see(s0=[1])
    ranges.premap(*expected(s70=[2], s0=[1, 2]))
    ranges.premap(*expected(s1=list(range(9))))
    assert ranges.see(s0=[1, 2]) == []
    assert ranges.at(1) == [-1] * MAX_BLOCKS


TABLES = st.dictionaries(
    st.integers(0, 5),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=MAX_BLOCKS),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(TABLES, TABLES, st.sets(st.integers(0, NUM_BLOCKS - 1))), max_size=12),
    limit=st.sampled_from([None, 90]),
)
def test_whatever_is_prepared_steps_find_their_blocks_and_keep_them(
    steps: list[tuple[dict[int, list[int]], dict[int, list[int]], set[int]]], limit: int | None
) -> None:
    mapper = NotedMapper(limit)
    ranges = Ranges(mapper)
    for tables, prepared, refused in steps:
        named = {f"s{slot}": blocks for slot, blocks in tables.items()}
        ranges.keep_only(*tables)
        ranges.see(**named)
        assert ranges.num_in_use == len({block for blocks in tables.values() for block in blocks})
        mapper.refused = refused
        ranges.premap(*expected(**{f"s{slot}": blocks for slot, blocks in prepared.items()}))
        mapper.refused = set()
        for slot, blocks in tables.items():
            assert ranges.at(slot)[: len(blocks)] == blocks, "the step still computes"
        assert mapper.areas() <= ranges.num_areas
        for slot in range(6):
            known = ranges.mapped(slot)
            assert known == ranges.at(slot)[: len(known)]
            assert set(ranges.at(slot)[len(known) :]) <= {-1}
    ranges.keep_only()
    assert ranges.num_in_use == 0


def test_random_histories_map_the_blocks_of_the_tables_within_the_limit() -> None:
    rng = np.random.default_rng(4)
    mapper = NotedMapper(max_mappings=40)
    ranges = Ranges(mapper)
    tables: dict[int, list[int]] = {}
    for _ in range(500):
        slot = int(rng.integers(6))
        if slot in tables and rng.random() < 0.4:
            del tables[slot]
        else:
            length = int(rng.integers(1, MAX_BLOCKS + 1))
            shared = int(rng.integers(length + 1))
            own = rng.permutation(np.arange(8, NUM_BLOCKS))[: length - shared]
            tables[slot] = [*range(shared), *own.tolist()]
        ranges.keep_only(*tables)
        running = [s for s in tables if rng.random() < 0.5]
        if running:
            ranges.see(**{f"s{s}": tables[s] for s in running})
        assert mapper.areas() <= 40
        for s in range(6):
            assert ranges.mapped(s) == ranges.at(s)[: len(ranges.mapped(s))]
            assert set(ranges.at(s)[len(ranges.mapped(s)) :]) <= {-1}
    ranges.keep_only()
    assert ranges.num_in_use == 0
