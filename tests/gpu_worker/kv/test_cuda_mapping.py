"""Mapping on GPUs, against a driver that refuses what a real one refuses."""

import sys

import numpy as np
import pytest
import torch

from gpu_worker.kv.allocation import with_as_many_ranges
from gpu_worker.kv.cuda_mapping import CudaMapper, bytes_at, load_driver, page_bytes
from gpu_worker.kv.mapped_ranges import MappedRanges
from gpu_worker.kv.mapping import MapError, MappingFailed
from tests.gpu_worker.kv.fake_cuda import PAGE_BYTES, FakeDriver, FakeEvent

CPU = torch.device("cpu")
NUM_BLOCKS = 6
NUM_PLACES = 12


def make(driver: FakeDriver, block_bytes: int = PAGE_BYTES) -> CudaMapper:
    events = FakeEvent(driver), FakeEvent(driver)
    return CudaMapper(driver, events, CPU, NUM_BLOCKS, NUM_PLACES, block_bytes)


def seen(driver: FakeDriver, mapper: CudaMapper) -> dict[int, int]:
    """Blocks by place of the space."""
    blocks = {handle: block for block, handle in enumerate(driver.handles)}
    first, size = mapper.space.data_ptr(), mapper.space.numel() // NUM_PLACES
    places = {address: (address - first) // size for address in driver.accessible}
    return {
        place: blocks[driver.mapped[address][1]]
        for address, place in sorted(places.items())
        if 0 <= place < NUM_PLACES
    }


@pytest.mark.parametrize("block_bytes", [PAGE_BYTES, 3 * PAGE_BYTES])
def test_memory_is_there_before_anything_is_mapped(block_bytes: int) -> None:
    driver = FakeDriver()
    mapper = make(driver, block_bytes)
    assert list(driver.handles.values()) == [block_bytes] * NUM_BLOCKS
    assert len(driver.accessible) == NUM_BLOCKS, "the pool is mapped once and for all"
    assert mapper.pool.numel() == NUM_BLOCKS * block_bytes
    assert mapper.space.numel() == NUM_PLACES * block_bytes
    assert page_bytes(driver, 0) == PAGE_BYTES


def test_blocks_appear_at_their_places_and_at_several() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    mapper.map(4, 1, 3)
    mapper.map(0, 2, 1)
    assert seen(driver, mapper) == {0: 2, 4: 1, 5: 2, 6: 3}
    mapper.map(5, 0, 1)
    mapper.unmap(6, 2)
    assert seen(driver, mapper) == {0: 2, 4: 1, 5: 0}


def test_nothing_is_unmapped_while_work_may_read_it() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    mapper.begin_step()
    mapper.map(0, 1, 2)
    mapper.mark_queued()
    mapper.begin_step()
    mapper.map(2, 3, 1)  # no block was mapped there: no reason to wait
    assert driver.unfinished
    mapper.map(1, 4, 1)
    assert not driver.unfinished
    mapper.mark_queued()
    mapper.begin_step()
    mapper.unmap(0, 3)
    mapper.unmap(0, 3)
    assert seen(driver, mapper) == {}


def test_what_the_running_step_does_not_read_is_unmapped_while_it_runs() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    ranges = MappedRanges(mapper, num_ranges=3, max_blocks=4, num_blocks=NUM_BLOCKS)
    table, two = np.array([[1, 2, 3]], np.int32), np.array([2])
    ranges.map_tables(np.array([0]), table, np.array([3]))
    mapper.mark_queued()
    ranges.map_tables(np.array([1]), table, two)
    mapper.mark_queued()
    assert len(driver.unfinished) == 2
    first = mapper.space.data_ptr()
    driver.reads = {first + place * PAGE_BYTES for place in (4, 5)}  # the second step
    ranges.premap(np.array([0, 1]), np.array([[4, 5, 0], [1, 2, 0]], np.int32), np.array([2, 3]))
    assert len(driver.unfinished) == 1, "it waited for the first step, and not for the second"
    assert seen(driver, mapper) == {0: 4, 1: 5, 2: 3, 4: 1, 5: 2, 6: 0}


def test_what_the_running_step_reads_stays_though_its_sequence_is_gone_already() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    ranges = MappedRanges(mapper, num_ranges=3, max_blocks=4, num_blocks=NUM_BLOCKS)
    ranges.map_tables(np.array([0]), np.array([[1, 2]], np.int32), np.array([2]))
    mapper.mark_queued()
    ranges.keep(np.zeros(3, np.bool_))  # the next step begins, and premapping comes late
    ranges.premap(np.array([0]), np.array([[3, 4, 5]], np.int32), np.array([3]))
    assert seen(driver, mapper) == {0: 1, 1: 2, 2: 5}
    assert ranges.num_in_use == 0
    ranges.map_tables(np.array([0]), np.array([[3, 4, 5]], np.int32), np.array([3]))
    assert seen(driver, mapper) == {0: 3, 1: 4, 2: 5}


@pytest.mark.parametrize("refused", ["map", "access"])
def test_what_fails_leaves_nothing_behind_and_others_alone(refused: str) -> None:
    driver = FakeDriver()
    mapper = make(driver)
    mapper.map(0, 1, 2)
    driver.refused.add(refused)
    num_mapped = len(driver.mapped)
    with pytest.raises(MapError, match="CUDA_ERROR_INVALID_VALUE"):
        mapper.map(4, 1, 2)
    assert len(driver.mapped) == num_mapped
    driver.refused.clear()
    mapper.map(4, 1, 2)
    assert seen(driver, mapper) == {0: 1, 1: 2, 4: 1, 5: 2}


def test_closing_gives_everything_back() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    mapper.map(0, 1, 2)
    mapper.mark_queued()
    mapper.close()
    assert not driver.mapped
    assert not driver.handles
    assert not driver.reserved
    mapper.close()


def test_addresses_are_halved_until_the_driver_reserves_them() -> None:
    driver = FakeDriver(most_addresses=NUM_PLACES * PAGE_BYTES)
    events = FakeEvent(driver), FakeEvent(driver)

    def with_ranges(num_ranges: int) -> CudaMapper:
        return CudaMapper(driver, events, CPU, NUM_BLOCKS, 3 * num_ranges, PAGE_BYTES)

    mapper = with_as_many_ranges(with_ranges, 4 * NUM_PLACES // 3 + 1)
    assert mapper.space.numel() == NUM_PLACES * PAGE_BYTES
    assert len(driver.handles) == NUM_BLOCKS, "memory is allocated once"
    mapper.close()
    driver.most_addresses = 3 * PAGE_BYTES
    with pytest.raises(MapError, match=r"cuMemAddressReserve: .* bytes of addresses"):
        with_as_many_ranges(with_ranges, 4)
    assert not driver.handles
    assert not driver.reserved


def test_a_pool_that_does_not_fit_gives_back_what_it_got() -> None:
    driver = FakeDriver(most_handles=NUM_BLOCKS - 1)
    with pytest.raises(MapError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        make(driver)
    assert not driver.handles


def test_sequences_come_and_go_for_long_without_a_wrong_call() -> None:
    driver = FakeDriver()
    mapper = make(driver)
    ranges = MappedRanges(mapper, num_ranges=3, max_blocks=4, num_blocks=NUM_BLOCKS)
    rng = np.random.default_rng(0)
    at_start = len(driver.calls)
    for step in range(300):
        slots = rng.permutation(3)[: rng.integers(1, 4)]
        tables = np.stack([rng.permutation(NUM_BLOCKS)[:4] for _ in slots]).astype(np.int32)
        lengths = rng.integers(1, 5, len(slots))
        driver.refused = {"access"} if step % 7 == 3 else set()
        try:
            ranges.map_tables(slots, tables, lengths)
        except MappingFailed:
            assert driver.refused
            continue
        mapper.mark_queued()
        driver.reads = None
        found = seen(driver, mapper)
        for slot, table, length in zip(slots.tolist(), tables, lengths, strict=True):
            assert [found[4 * slot + column] for column in range(length)] == table[:length].tolist()
        known = {
            4 * slot + column: block
            for slot in range(3)
            for column, block in enumerate(ranges.mapped(slot))
            if block >= 0
        }
        assert found == known
    # No step waits for memory: all of it was allocated at the start.
    assert {call[0] for call in driver.calls[at_start:]} == {"map", "access", "unmap"}
    assert [call[0] for call in driver.calls].count("create") == NUM_BLOCKS


def test_tensors_over_addresses_where_nothing_is_are_harmless() -> None:
    backing = torch.arange(64, dtype=torch.uint8)
    view = bytes_at(backing.data_ptr(), 64, CPU)
    assert torch.equal(view, backing)
    nowhere = bytes_at(1 << 44, 1 << 40, CPU)
    assert nowhere.view(torch.bfloat16)[5:].data_ptr() == (1 << 44) + 10


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(MapError, match="pip install cuda-bindings"):
        load_driver()
