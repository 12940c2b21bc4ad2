"""Batches over poisoned pools, and the plainest attention there is to compare with."""

from dataclasses import dataclass, field

import torch

from kernels.interface import (
    QUANTIZED_DTYPE,
    AttentionBackend,
    AttentionParams,
    LayerCache,
    RaggedBatch,
)

# Followed, such an id is a wild read.
ABSURD_BLOCK = 2**31 - 1
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Shape:
    """What a test varies. ``sequences`` are pairs (query rows, context length)."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    layout: str = "layer_major"
    padding_rows: int = 3
    scales: tuple[float, float] | None = None  # of keys and values in a pool of 8-bit floats


@dataclass
class Case:
    """A batch whose pool is NaN wherever no token of a sequence lives, block 0 included."""

    shape: Shape
    cache: LayerCache
    batch: RaggedBatch
    params: AttentionParams
    query: torch.Tensor  # [T, H, D], not contiguous
    out: torch.Tensor  # [T, H, D], not contiguous
    keys: list[torch.Tensor] = field(default_factory=list)  # per sequence [context, Hkv, D]
    values: list[torch.Tensor] = field(default_factory=list)  # per sequence [context, Hkv, D]


def empty_cache(shape: Shape, num_blocks: int) -> LayerCache:
    """A pool full of NaN in one of the physical layouts."""
    n, h, b, d = num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim
    nan = torch.tensor(float("nan")).to(shape.dtype if shape.scales is None else QUANTIZED_DTYPE)
    if shape.layout == "layer_major":
        pool = nan.repeat(3, 2, n, h, b, d)[1]
    elif shape.layout == "block_major":
        pool = nan.repeat(n, 3, 2, h, b, d)[:, 1].transpose(0, 1)
    elif shape.layout == "token_major":
        pool = nan.repeat(n, b, 3, 2, h, d)[:, :, 1].permute(2, 0, 3, 1, 4)
    else:
        raise ValueError(shape.layout)
    return LayerCache(pool[0], pool[1], *(shape.scales or ()))


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Random tensors, blocks handed out in random order, rows of padding at the end."""
    torch.manual_seed(seed)
    size = shape.block_size
    counts = [-(-context // size) for _, context in shape.sequences]
    cache = empty_cache(shape, num_blocks=sum(counts) + 2)
    free = (torch.randperm(sum(counts) + 1) + 1).tolist()  # block 0 belongs to no sequence
    tables = torch.full((len(counts), max(counts) + 2), ABSURD_BLOCK, dtype=torch.int32)
    keys, values, slots = [], [], []
    for sequence, (num_rows, context) in enumerate(shape.sequences):
        blocks = [free.pop() for _ in range(counts[sequence])]
        tables[sequence, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        key, value = torch.randn(2, context, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        if shape.scales is not None:  # only what a pool can hold, so that storing changes nothing
            key, value = (_quantized(x, s) for x, s in zip((key, value), shape.scales, strict=True))
        for position in range(context):
            block, offset = blocks[position // size], position % size
            cache.key[block, :, offset] = key[position] / cache.key_scale
            cache.value[block, :, offset] = value[position] / cache.value_scale
        keys.append(key)
        values.append(value)
        new = range(max(0, context - num_rows), context)
        slots += [blocks[p // size] * size + p % size for p in new]
    rows = [num_rows for num_rows, _ in shape.sequences]
    total = sum(rows) + shape.padding_rows
    batch = RaggedBatch(
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_tables=tables,
        context_lens=torch.tensor([c for _, c in shape.sequences], dtype=torch.int32),
        query_starts=torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).to(torch.int32),
        max_query_len=max(rows),
        max_context_len=max(c for _, c in shape.sequences),
    )
    query = torch.randn(shape.num_heads, total, shape.head_dim).to(shape.dtype).transpose(0, 1)
    out = torch.full((shape.num_heads, total, shape.head_dim), UNTOUCHED, dtype=shape.dtype)
    params = AttentionParams(shape.head_dim**-0.5, shape.window, shape.softcap)
    return Case(shape, cache, batch, params, query, out.transpose(0, 1), keys, values)


def _quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).to(QUANTIZED_DTYPE).to(x.dtype) * scale


def eager(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Attention of every sequence over its own dense keys and values, computed in ``dtype``."""
    out = torch.full(case.query.shape, UNTOUCHED, dtype=dtype)
    group = case.shape.num_heads // case.shape.num_kv_heads
    first = 0
    for (num_rows, context), key, value in zip(
        case.shape.sequences, case.keys, case.values, strict=True
    ):
        if num_rows and context:
            query = case.query[first : first + num_rows].to(dtype).transpose(0, 1)  # [H, R, D]
            key = key.to(dtype).repeat_interleave(group, 1).permute(1, 2, 0)  # [H, D, N]
            value = value.to(dtype).repeat_interleave(group, 1).transpose(0, 1)  # [H, N, D]
            logits = query @ key * case.params.scale  # [H, R, N]
            if case.params.softcap is not None:
                logits = case.params.softcap * torch.tanh(logits / case.params.softcap)
            for row in range(num_rows):
                position = context - num_rows + row
                logits[:, row, position + 1 :] = float("-inf")
                if case.params.sliding_window is not None:
                    logits[:, row, : max(0, position + 1 - case.params.sliding_window)] = float(
                        "-inf"
                    )
            attended = torch.softmax(logits, -1) @ value  # [H, R, D]
            out[first : first + num_rows] = attended.transpose(0, 1)
        first += num_rows
    return out


def assert_attends(case: Case, factor: float = 2.0) -> None:
    """``case.out`` is as close to float64 as torch in the same type is, up to ``factor``.

    Rows that the backend must not touch have to be exactly as they were.
    """
    exact = eager(case, torch.float64)
    same_type = eager(case, case.shape.dtype).double()
    rounding = torch.finfo(case.shape.dtype).eps * exact.abs().max().item()
    limit = factor * (same_type - exact).abs().max().item() + rounding / 4
    error = (case.out.double() - exact).abs().max().item()
    assert error <= limit, f"error {error:.2e} exceeds {limit:.2e} ({case.shape})"
    untouched = exact == UNTOUCHED
    assert torch.equal(case.out[untouched].double(), exact[untouched])


def assert_writes(backend: AttentionBackend, shape: Shape) -> None:
    """Every slot of the mapping holds its token bit by bit, and every other slot is still NaN."""
    torch.manual_seed(0)
    cache = empty_cache(shape, num_blocks=9)
    slots = torch.randperm(9 * shape.block_size)[: 4 * shape.block_size + 1]
    slots[2] = -1  # a row of padding
    size = (shape.num_kv_heads, len(slots), shape.head_dim)
    key = torch.randn(size).to(shape.dtype).transpose(0, 1)  # [T, Hkv, D], not contiguous
    value = torch.randn(size).to(shape.dtype).transpose(0, 1)
    if shape.scales is not None:  # Triton's interpreter rounds to 8 bits wrongly: leave no rest
        key, value = (_quantized(x, s) for x, s in zip((key, value), shape.scales, strict=True))
        key[1, 0, :2] = torch.tensor([30_000.0, -30_000.0])  # saturates
    expected = empty_cache(shape, num_blocks=9)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, shape.block_size)
            stored_key, stored_value = key[token].float(), value[token].float()
            if shape.scales is not None:
                stored_key = (stored_key / cache.key_scale).clamp(-448, 448)
                stored_value = (stored_value / cache.value_scale).clamp(-448, 448)
            expected.key[block, :, offset] = stored_key.to(cache.key.dtype)
            expected.value[block, :, offset] = stored_value.to(cache.value.dtype)
    backend.write_kv(key, value, cache, slots)
    for pool, wanted in ((cache.key, expected.key), (cache.value, expected.value)):
        torch.testing.assert_close(pool.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


MIXED = ((1, 33), (5, 77), (41, 111), (0, 5), (2, 0), (1, 1), (17, 17), (3, 130))

# One name per thing that can go wrong; every backend runs them all in every type it serves.
SHAPES = {
    "mixed_batch": Shape(MIXED),
    "multi_query": Shape(MIXED, num_heads=8, num_kv_heads=1, head_dim=32),
    "no_groups": Shape(MIXED, num_heads=3, num_kv_heads=3, head_dim=16),
    "group_of_3": Shape(MIXED, num_heads=6, num_kv_heads=2, head_dim=80),
    "group_of_7": Shape(MIXED, num_heads=7, num_kv_heads=1, head_dim=96),
    "wide_heads": Shape(((1, 70), (20, 41)), num_heads=2, num_kv_heads=1, head_dim=256),
    "heads_of_128": Shape(((1, 70), (33, 90)), head_dim=128, block_size=64),
    "window": Shape(MIXED, window=20),
    "window_of_one": Shape(MIXED, window=1, head_dim=32),
    "window_beyond_context": Shape(MIXED, window=1000, head_dim=32),
    "softcap": Shape(MIXED, softcap=2.0),
    "wide_softcap": Shape(((1, 33), (13, 40)), softcap=50.0),
    "window_and_softcap": Shape(MIXED, window=65, softcap=3.0, num_heads=5, num_kv_heads=1),
    "blocks_of_1": Shape(MIXED, block_size=1, head_dim=32),
    "blocks_of_2": Shape(MIXED, block_size=2, head_dim=32, window=9),
    "blocks_of_256": Shape(MIXED, block_size=256, head_dim=32, window=40),
    "block_major": Shape(MIXED, layout="block_major"),
    "token_major": Shape(MIXED, layout="token_major", block_size=8),
    "blocks_of_8": Shape(MIXED, block_size=8, head_dim=80, num_heads=2, num_kv_heads=1),
    "blocks_of_128": Shape(((1, 300), (9, 140)), block_size=128, head_dim=96),
    "one_block_per_sequence": Shape(
        MIXED, block_size=2048, head_dim=16, num_kv_heads=1, layout="token_major"
    ),
    "quantized": Shape(MIXED, dtype=torch.float16, scales=(0.5, 0.125), head_dim=32),
    "decode_only": Shape(tuple((1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 200))),
    "one_long_prompt": Shape(((150, 150),), num_heads=2, num_kv_heads=2, head_dim=32),
}
