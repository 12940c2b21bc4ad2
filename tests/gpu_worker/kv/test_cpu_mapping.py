"""Mapping on CPUs, checked by the operating system's own records."""

import gc
import os
from pathlib import Path

import pytest
import torch

from gpu_worker.kv.cpu_mapping import PAGE_BYTES, CpuMapper, spare_mappings
from gpu_worker.kv.mapping import MapError

NUM_BLOCKS = 8
BLOCK_BYTES = 2 * PAGE_BYTES


def make(num_places: int = 16) -> CpuMapper:
    return CpuMapper(NUM_BLOCKS, num_places, BLOCK_BYTES, max_mappings=1_000)


def at(memory: torch.Tensor, index: int) -> torch.Tensor:
    """One block or place."""
    return memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


def is_readable(memory: torch.Tensor) -> bool:
    """Whether the system can read the first byte; a direct read could end the process."""
    receiver, sender = os.pipe()
    try:
        return os.write(sender, memory[:1].numpy()) == 1
    except OSError:
        return False
    finally:
        os.close(receiver)
        os.close(sender)


def num_areas() -> int:
    """Mappings of memory files like ours in this process."""
    return Path("/proc/self/maps").read_text().count("pagestream-kv")


def test_a_block_at_two_places_is_the_same_bytes() -> None:
    mapper = make()
    mapper.map(3, 5, 2)
    mapper.map(9, 6, 1)
    at(mapper.space, 4).fill_(7)
    assert at(mapper.space, 9).eq(7).all()
    assert at(mapper.pool, 6).eq(7).all()
    at(mapper.space, 9)[-1] = 8
    assert at(mapper.space, 4)[-1] == 8
    assert at(mapper.pool, 5).eq(0).all()
    assert at(mapper.pool, 7).eq(0).all()


def test_another_block_takes_the_place_of_the_first() -> None:
    mapper = make()
    for block in range(NUM_BLOCKS):
        at(mapper.pool, block).fill_(block)
    mapper.map(2, 0, 4)
    mapper.map(3, 6, 1)
    found = [int(at(mapper.space, place)[0]) for place in range(2, 6)]
    assert found == [0, 6, 2, 3]


def test_only_places_with_a_block_can_be_read() -> None:
    mapper = make()
    mapper.map(1, 0, 3)
    mapper.unmap(2, 1)
    found = [is_readable(at(mapper.space, place)) for place in range(5)]
    assert found == [False, True, False, True, False]
    mapper.unmap(0, 16)
    assert not any(is_readable(at(mapper.space, place)) for place in range(16))


def test_addresses_are_plenty_and_cost_nothing() -> None:
    mapper = make(num_places=2**44 // BLOCK_BYTES)
    last = mapper.space.numel() // BLOCK_BYTES - 1
    mapper.map(last, 3, 1)
    at(mapper.space, last).fill_(9)
    assert at(mapper.pool, 3).eq(9).all()


def test_everything_goes_with_the_last_tensor() -> None:
    gc.collect()  # frees tensors of earlier tests
    before = num_areas()
    mapper = make()
    mapper.map(0, 0, 1)
    mapper.map(2, 1, 1)
    view = at(mapper.space, 2).view(torch.float32)
    assert num_areas() == before + 3  # the pool is one mapping
    del mapper
    gc.collect()
    view.fill_(1.0)  # still mapped
    assert num_areas() == before + 2
    del view
    gc.collect()
    assert num_areas() == before


def test_a_mapping_that_the_system_refuses_is_an_error_with_its_reason() -> None:
    mapper = make()
    mapper.map(0, 0, 2)
    at(mapper.space, 0).fill_(4)
    with pytest.raises(MapError, match="8192 bytes: Value too large"):
        mapper.map(4, -1, 1)
    assert not is_readable(at(mapper.space, 4))
    assert at(mapper.space, 0).eq(4).all()


def test_too_large_a_space_is_an_error_with_its_reason() -> None:
    with pytest.raises(MapError, match="Cannot allocate memory"):
        make(num_places=2**56 // BLOCK_BYTES)


def test_other_users_of_memory_are_left_a_share_of_the_mappings() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < spare_mappings() < limit - 1_000
