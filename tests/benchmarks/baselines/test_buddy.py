"""The buddy allocator: no slot twice, none lost, and pieces join again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.buddy import BuddyAllocator, Run, size_of_run

_SIZES = st.integers(min_value=1, max_value=700)
# Allocations of so many slots; a negative number frees one of the runs that are held.
_STEPS = st.lists(st.integers(min_value=-20, max_value=300).filter(bool), max_size=60)


def _walk(buddy: BuddyAllocator, steps: list[int]) -> list[Run]:
    held: list[Run] = []
    for step in steps:
        if step < 0:
            if held:
                buddy.free(held.pop(-step % len(held)))
        elif (run := buddy.allocate(step)) is not None:
            assert run.size >= step
            held.append(run)
    return held


@given(_SIZES, _STEPS)
def test_every_slot_is_held_once_or_free(num_slots: int, steps: list[int]) -> None:
    buddy = BuddyAllocator(num_slots)
    held = _walk(buddy, steps)
    slots = [
        slot
        for run in [*held, *buddy.free_runs()]
        for slot in range(run.start, run.start + run.size)
    ]
    assert sorted(slots) == list(range(num_slots))
    assert buddy.num_free == num_slots - sum(run.size for run in held)


@given(_SIZES, _STEPS)
def test_runs_are_powers_of_two_and_aligned(num_slots: int, steps: list[int]) -> None:
    buddy = BuddyAllocator(num_slots)
    for run in [*_walk(buddy, steps), *buddy.free_runs()]:
        assert run.size & (run.size - 1) == 0
        assert run.start % run.size == 0


@given(_SIZES, _STEPS)
def test_when_all_is_free_again_the_pieces_are_those_of_the_beginning(
    num_slots: int, steps: list[int]
) -> None:
    buddy = BuddyAllocator(num_slots)
    begin = buddy.free_runs()
    for run in _walk(buddy, steps):
        buddy.free(run)
    assert buddy.free_runs() == begin


@given(_SIZES, _STEPS, st.integers(min_value=1, max_value=700))
def test_nothing_is_refused_that_a_free_piece_could_hold(
    num_slots: int, steps: list[int], wanted: int
) -> None:
    buddy = BuddyAllocator(num_slots)
    _walk(buddy, steps)
    fits = any(run.size >= size_of_run(wanted) for run in buddy.free_runs())
    assert (buddy.allocate(wanted) is not None) == fits


def test_halves_join_to_what_they_were() -> None:
    buddy = BuddyAllocator(8)
    runs = [buddy.allocate(2) for _ in range(4)]
    assert runs == [Run(0, 2), Run(2, 2), Run(4, 2), Run(6, 2)]
    assert buddy.allocate(1) is None
    _, second, third, fourth = (run for run in runs if run is not None)
    buddy.free(second)
    buddy.free(third)
    assert buddy.allocate(4) is None, "slots 2 to 6 are free, but are no buddies"
    buddy.free(fourth)
    assert buddy.allocate(4) == Run(4, 4)


def test_a_run_is_freed_once() -> None:
    buddy = BuddyAllocator(8)
    run = buddy.allocate(3)
    assert run is not None
    buddy.free(run)
    with pytest.raises(ValueError, match=r"Run\(start=0, size=4\) is not in use"):
        buddy.free(run)


def test_a_pool_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 0 slots"):
        BuddyAllocator(0)
