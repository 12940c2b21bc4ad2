"""Moves of whole blocks: the plain mover, swapping, and the layout that needs no mover."""

import pytest
import torch

from kernels.block_packing import bytes_per_block, whole_blocks
from kernels.block_swap import BlockSwapper, runs
from kernels.cpu.blocks.block_mover import CpuMover
from kernels.interface import BlockMover, LayerCache
from kernels.reference_block_mover import ReferenceMover
from kernels.select import select_mover
from tests.kernels.block_cases import (
    LAYOUTS,
    NUM_BLOCKS,
    assert_moves,
    assert_swaps,
    block_bytes,
    make_pool,
)

MOVERS = [ReferenceMover, CpuMover]


@pytest.mark.parametrize("make_mover", MOVERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_moves_exactly_the_listed_blocks(
    make_mover: type[BlockMover], layout: str, block_size: int, dtype: torch.dtype
) -> None:
    assert_moves(make_mover, make_pool(layout, dtype, block_size=block_size))


@pytest.mark.parametrize("make_mover", MOVERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_swapped_out_comes_back(make_mover: type[BlockMover], layout: str) -> None:
    assert_swaps(make_mover, make_pool(layout))


def test_cpus_get_compiled_moves() -> None:
    assert isinstance(select_mover(make_pool("layer_major")), CpuMover)


def test_threads_share_a_large_move() -> None:
    layers = make_pool("token_major", torch.float32, head_dim=128, block_size=256)
    mover = CpuMover(layers)
    assert 4 * mover.bytes_per_block > 2**20, "a small one stays on one thread"
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_moves(CpuMover, layers)
    finally:
        torch.set_num_threads(before)


def test_a_block_of_a_block_major_pool_lies_in_one_piece():
    layers = make_pool("block_major")
    whole = whole_blocks(layers)
    assert whole is not None
    assert whole.shape == (NUM_BLOCKS, bytes_per_block(layers))
    assert all(torch.equal(whole[b], block_bytes(layers, b)) for b in range(NUM_BLOCKS))
    whole[4] = 3
    assert (block_bytes(layers, 4) == 3).all()


@pytest.mark.parametrize("layout", ["layer_major", "token_major", "mixed_shapes"])
def test_a_block_of_another_pool_does_not(layout):
    assert whole_blocks(make_pool(layout)) is None


def test_a_part_of_a_block_major_pools_layers_is_not_whole():
    layers = make_pool("block_major")
    assert whole_blocks(layers[1:]) is None
    assert whole_blocks(layers[::-1]) is None
    assert whole_blocks([LayerCache(cache.value, cache.key) for cache in layers]) is None


def test_neighbours_that_stay_neighbours_go_together():
    assert list(runs([4, 5, 6, 9, 8, 7], [0, 1, 3, 4, 5, 6])) == [
        (4, 0, 2),
        (6, 3, 1),
        (9, 4, 1),
        (8, 5, 1),
        (7, 6, 1),
    ]
    assert list(runs([], [])) == []


def test_refuses_packed_blocks_of_another_size():
    layers = make_pool("layer_major")
    packed = torch.zeros((2, bytes_per_block(layers) - 2), dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="packed blocks"):
        ReferenceMover(layers).pack(none, packed, none)
    with pytest.raises(ValueError, match="packed blocks"):
        BlockSwapper(layers, ReferenceMover(layers), packed)
    with pytest.raises(ValueError, match="1 sources and 0 targets"):
        ReferenceMover(layers).copy(torch.zeros(1, dtype=torch.int64), none)
    with pytest.raises(ValueError, match="targets"):
        CpuMover(layers).copy(none, none.int())
