"""Measures kernels that move keys and values: writes, copies of blocks, swaps."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.kernels.cases import PoolShape
from benchmarks.gpu.kernels.clock import Clock
from benchmarks.gpu.kernels.pools import make_layers
from benchmarks.gpu.kernels.report import Baseline, Row
from kernels.block_packing import whole_blocks
from kernels.block_swap import BlockSwapper
from kernels.interface import AttentionBackend, BlockMover, LayerCache

MakeMover = Callable[[list[LayerCache]], BlockMover]

# Several times an H200's L2 cache.
_ROTATED_BYTES = 256 * 2**20
_SWAP_TARGET = 0.85


def measure_bandwidth(clock: Clock, device: torch.device, num_bytes: int) -> tuple[Row, Row]:
    """Measure copying, whose rate is the unit of all other shares, and reading alone."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = clock.time([lambda: target.copy_(source)])
    rate = 2 * num_bytes / (copied.median_us * 1e-6)
    read = clock.time([lambda: torch.sum(source)])
    return (
        Row("device copy", copied, 2 * num_bytes, "bytes", rate),
        Row("device read (sum)", read, num_bytes, "bytes", rate),
    )


def measure_write(
    clock: Clock,
    backend: AttentionBackend,
    shape: PoolShape,
    num_tokens: int,
    device: torch.device,
    ceiling: float,
) -> Iterator[Row]:
    """Write new keys and values of one layer into their slots, compared with ``index_put_``."""
    size, heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    num_blocks = -(-num_tokens // size)
    work = 2 * 2 * num_tokens * heads * dim * 2  # keys and values, read and written, 16 bits
    slots = torch.randperm(num_blocks * size, device=device)[:num_tokens]
    block, offset = slots // size, slots % size
    ours, theirs, last = [], [], []
    for _ in range(1 + _ROTATED_BYTES // work if device.type == "cuda" else 1):
        new = torch.randn(2, num_tokens, heads, dim, device=device).bfloat16()
        pool = torch.zeros(2, num_blocks, heads, size, dim, dtype=new.dtype, device=device)
        other = torch.zeros_like(pool)

        def write(new: torch.Tensor = new, pool: torch.Tensor = pool) -> None:
            backend.write_kv(new[0], new[1], LayerCache(pool[0], pool[1]), slots)

        def index_put(new: torch.Tensor = new, pool: torch.Tensor = other) -> None:
            pool[0][block, :, offset] = new[0]
            pool[1][block, :, offset] = new[1]

        ours.append(write)
        theirs.append(index_put)
        last = [pool, other]
    timing = clock.time(ours)
    baseline = Baseline("index_put_", clock.time(theirs))
    _require_equal("write", *last)
    name = f"write {num_tokens} tokens"
    yield Row(name, timing, work, "bytes", ceiling, 0.8, None, (baseline,))


def measure_copies(
    clock: Clock,
    make_mover: MakeMover,
    shape: PoolShape,
    num_pairs: int,
    device: torch.device,
    ceiling: float,
    layout: str,
) -> Iterator[Row]:
    """Copy blocks of all layers in one launch, compared with one ``copy_`` per block.

    Only a block-major pool has contiguous blocks, so the baseline is measured there.
    """
    order = torch.randperm(shape.num_blocks, device=device)
    sources, targets = order[:num_pairs], order[num_pairs : 2 * num_pairs]
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    work = 2 * num_pairs * shape.bytes_per_block
    layers = make_layers(shape, layout, device)
    mover = make_mover(layers)
    timing = clock.time([partial(mover.copy, sources, targets)])
    for cache in layers:
        _require_equal(layout, cache.key[sources], cache.key[targets])
        _require_equal(layout, cache.value[sources], cache.value[targets])
    baselines: tuple[Baseline, ...] = ()
    whole = whole_blocks(layers)
    if whole is not None:

        def one_by_one(whole: torch.Tensor = whole) -> None:
            for source, target in pairs:
                whole[target].copy_(whole[source])

        baselines = (Baseline("copy_ per block", clock.time([one_by_one])),)
    name = f"copy {num_pairs} blocks of all layers, {layout}"
    yield Row(name, timing, work, "bytes", ceiling, 0.85, None, baselines)


def measure_swaps(
    clock: Clock,
    make_mover: MakeMover,
    shape: PoolShape,
    num_moved: int,
    device: torch.device,
    layout: str,
) -> Iterator[Row]:
    """Swap out and in, compared with one copy of as many bytes between device and pinned memory.

    Blocks are in random order, so that none are neighbours on both sides.
    """
    size = shape.bytes_per_block
    pinned = device.type == "cuda"
    host = torch.zeros((num_moved, size), dtype=torch.uint8, pin_memory=pinned)
    flat = torch.empty((num_moved, size), dtype=torch.uint8, device=device)
    whole_out = clock.time([lambda: host.copy_(flat, non_blocking=True)], from_host=True)
    whole_in = clock.time([lambda: flat.copy_(host, non_blocking=True)], from_host=True)
    blocks = torch.randperm(shape.num_blocks)[:num_moved]
    places = torch.randperm(num_moved)
    layers = make_layers(shape, layout, device)
    mover = make_mover(layers)
    swapper = BlockSwapper(layers, mover, host)
    out = clock.time([partial(swapper.swap_out, blocks, places)], from_host=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    packed = torch.empty_like(flat)
    mover.pack(blocks.to(device), packed, places.to(device))
    _require_equal(f"swap out, {layout}", host, packed.cpu())
    back = clock.time([partial(swapper.swap_in, places, blocks)], from_host=True)
    again = torch.empty_like(flat)
    mover.pack(blocks.to(device), again, places.to(device))
    _require_equal(f"swap in, {layout}", packed, again)
    # Only the layout in which one copy swaps a block has a target; the others are shown.
    wanted = _SWAP_TARGET if layout == "block_major" else None
    for way, timing, whole in (("out", out, whole_out), ("in", back, whole_in)):
        baseline = Baseline("one pinned copy_", whole, wanted_ratio=wanted)
        name = f"swap {way} {num_moved} blocks, {layout}"
        yield Row(name, timing, num_moved * size, "bytes", baselines=(baseline,))


def _require_equal(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not torch.equal(ours, theirs):
        raise RuntimeError(f"{what}: the bytes differ, so no time is worth anything")
