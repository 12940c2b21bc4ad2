"""Pools of several layers, and what a move of blocks has to leave behind."""

from collections.abc import Callable, Sequence

import torch

from kernels.block_packing import bytes_per_block
from kernels.block_swap import BlockSwapper
from kernels.interface import INT8, BlockMover, LayerCache

NUM_BLOCKS = 9
LAYOUTS = ("layer_major", "block_major", "token_major", "mixed_shapes", "token_scales")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals NaN there, and every float type can be compared."""
    return tensor.contiguous().view(torch.uint8)


def make_pool(
    layout: str,
    dtype: torch.dtype = torch.float16,
    head_dim: int = 40,
    block_size: int = 8,
) -> list[LayerCache]:
    """Three layers of random bytes, NaN among them."""
    n, h, b, d = NUM_BLOCKS, 2, block_size, head_dim
    torch.manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        size = torch.empty(0, dtype=dtype).element_size()
        noise = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
        return noise.view(dtype)

    if layout == "token_scales":
        octets = [random(2, n, h, b, d, dtype=INT8) for _ in range(3)]
        scales = [random(2, n, h, b, 1, dtype=torch.float32) for _ in range(3)]
        return [LayerCache.of(*pool, *each) for pool, each in zip(octets, scales, strict=True)]
    if layout == "layer_major":
        pools = [random(2, n, h, b, d) for _ in range(3)]
    elif layout == "block_major":
        pools = list(random(n, 3, 2, h, b, d).permute(1, 2, 0, 3, 4, 5))
    elif layout == "token_major":
        pools = list(random(n, b, 3, 2, h, d).permute(2, 3, 0, 4, 1, 5))
    else:
        pools = [random(2, n, h, b, d), random(2, n, 1, b, 2 * d), random(2, n, h, b, d)]
    return [LayerCache(pool[0], pool[1]) for pool in pools]


def block_bytes(layers: Sequence[LayerCache], block: int) -> torch.Tensor:
    """The bytes of one block as the packed format orders them."""
    shares = [bits(x[block]).flatten() for cache in layers for x in cache.tensors]
    return torch.cat(shares)


def all_bytes(layers: Sequence[LayerCache]) -> list[torch.Tensor]:
    return [block_bytes(layers, block) for block in range(NUM_BLOCKS)]


def assert_moves(
    make_mover: Callable[[Sequence[LayerCache]], BlockMover],
    layers: Sequence[LayerCache],
) -> None:
    """Copies, packs and unpacks what is listed, byte by byte, and nothing else."""
    mover = make_mover(layers)
    assert mover.bytes_per_block == bytes_per_block(layers)
    expected = all_bytes(layers)
    sources, targets = torch.tensor([3, 0, 3, 7]), torch.tensor([8, 5, 1, 2])
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[target] = expected[source]
    mover.copy(sources, targets)
    mover.copy(sources[:0], targets[:0])
    assert all(map(torch.equal, all_bytes(layers), expected))

    packed = torch.full((6, mover.bytes_per_block), 77, dtype=torch.uint8)
    wanted = packed.clone()
    rows = torch.tensor([5, 0, 2])
    taken = torch.tensor([4, 8, 4])
    for block, row in zip(taken.tolist(), rows.tolist(), strict=True):
        wanted[row] = expected[block]
    mover.pack(taken, packed, rows)
    assert torch.equal(packed, wanted)

    back = torch.tensor([6, 0, 7])
    for block, row in zip(back.tolist(), rows.tolist(), strict=True):
        expected[block] = wanted[row]
    mover.unpack(packed, rows, back)
    assert all(map(torch.equal, all_bytes(layers), expected))
    assert torch.equal(packed, wanted)


def assert_swaps(
    make_mover: Callable[[Sequence[LayerCache]], BlockMover],
    layers: Sequence[LayerCache],
) -> None:
    """What was swapped out comes back elsewhere, byte by byte."""
    mover = make_mover(layers)
    pinned = layers[0].key.device.type == "cuda"
    host = torch.zeros((12, mover.bytes_per_block), dtype=torch.uint8, pin_memory=pinned)
    swapper = BlockSwapper(layers, mover, host)
    expected = [block.cpu() for block in all_bytes(layers)]
    swapper.swap_out(torch.tensor([2, 3, 4, 0, 2]), torch.tensor([7, 8, 9, 1, 0]))
    if pinned:
        torch.cuda.synchronize()
    for block, row in ((2, 7), (3, 8), (4, 9), (0, 1), (2, 0)):
        assert torch.equal(host[row], expected[block])
    untouched = [row for row in range(12) if row not in (7, 8, 9, 1, 0)]
    assert not host[untouched].any()
    swapper.swap_in(torch.tensor([7, 8, 1, 1]), torch.tensor([0, 1, 5, 8]))
    for row, block in ((7, 0), (8, 1), (1, 5), (1, 8)):
        expected[block] = host[row]
    assert all(map(torch.equal, (block.cpu() for block in all_bytes(layers)), expected))
