"""Batches over poisoned pools, and the plainest attention there is to compare with."""

from dataclasses import dataclass, field

import torch

from kernels.interface import (
    FP8,
    INT8,
    INT8_LEVELS,
    AttentionBackend,
    AttentionParams,
    LayerCache,
    RaggedBatch,
    may_hold,
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
    cache_dtype: torch.dtype | None = None  # if the queries' type may be held in it
    scales: tuple[float, float] | None = None  # of keys and values in a pool of 8-bit floats

    @property
    def stored(self) -> torch.dtype:
        """Type of keys and values in the pool."""
        wanted = FP8 if self.scales is not None else self.cache_dtype
        return wanted if wanted is not None and may_hold(wanted, self.dtype) else self.dtype


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
    nan = torch.tensor(float("nan"))
    if shape.stored == INT8:  # has no NaN: the scales are NaN instead
        pool = _empty_pool(torch.tensor(INT8_LEVELS, dtype=INT8), shape, num_blocks, shape.head_dim)
        scales = _empty_pool(nan, shape, num_blocks, 1)
        return LayerCache.of(*pool, *scales)
    pool = _empty_pool(nan.to(shape.stored), shape, num_blocks, shape.head_dim)
    return LayerCache(pool[0], pool[1], *(shape.scales or ()))


def _empty_pool(nan: torch.Tensor, shape: Shape, n: int, d: int) -> torch.Tensor:
    """Keys and values [2, n, Hkv, block_size, d] of one layer of a pool."""
    h, b = shape.num_kv_heads, shape.block_size
    if shape.layout == "layer_major":
        pool = nan.repeat(3, 2, n, h, b, d)[1]
    elif shape.layout == "block_major":
        pool = nan.repeat(n, 3, 2, h, b, d)[:, 1].transpose(0, 1)
    elif shape.layout == "token_major":
        pool = nan.repeat(n, b, 3, 2, h, d)[:, :, 1].permute(2, 0, 3, 1, 4)
    else:
        raise ValueError(shape.layout)
    return pool


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Random tensors, blocks handed out in random order, rows of padding at the end."""
    torch.manual_seed(seed)
    size = shape.block_size
    counts = [-(-context // size) for _, context in shape.sequences]
    cache = empty_cache(shape, num_blocks=sum(counts) + 2)
    free = (torch.randperm(sum(counts) + 1) + 1).tolist()  # block 0 belongs to no sequence
    tables = torch.full((len(counts), max(counts) + 2), ABSURD_BLOCK, dtype=torch.int32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    slots: list[int] = []
    for sequence, (num_rows, context) in enumerate(shape.sequences):
        blocks = [free.pop() for _ in range(counts[sequence])]
        tables[sequence, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        key, value = torch.randn(2, context, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        for found, x, pool, scale, scales in (
            (keys, key, cache.key, cache.key_scale, cache.key_scales),
            (values, value, cache.value, cache.value_scale, cache.value_scales),
        ):
            stored = x / scale
            if scales is not None:
                steps = x.double().abs().amax(-1, keepdim=True).float() / INT8_LEVELS
                stored, scale = (x.double() / steps).round(), steps.double()
            stored = stored.to(shape.stored)
            # What the pool holds, in a type that has all of its digits.
            found.append(x if stored.dtype == x.dtype else stored.to(torch.float64) * scale)
            for position in range(context):
                block, offset = blocks[position // size], position % size
                pool[block, :, offset] = stored[position]
                if scales is not None:
                    scales[block, :, offset] = steps[position]
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
    if shape.stored == INT8:
        backend.write_kv(key, value, cache, slots)
        _assert_quantized(cache, key, value, slots)
        return
    if shape.stored != shape.dtype:  # Triton's interpreter rounds wrongly: leave no rest
        scales = shape.scales or (1.0, 1.0)
        key, value = (
            (x / s).to(shape.stored).to(x.dtype) * s
            for x, s in zip((key, value), scales, strict=True)
        )
    if shape.scales is not None:
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


def _assert_quantized(
    cache: LayerCache,
    key: torch.Tensor,  # [T, Hkv, D]
    value: torch.Tensor,  # [T, Hkv, D]
    slots: torch.Tensor,  # [T]
) -> None:
    """Rows are rounded to the nearest multiples of their scales; other slots are as they were."""
    block_size = cache.key.shape[2]
    tokens = {int(slot): token for token, slot in enumerate(slots)}
    for x, pool, scales in (
        (key, cache.key, cache.key_scales), (value, cache.value, cache.value_scales)
    ):  # fmt: skip
        assert scales is not None
        for slot in range(pool.shape[0] * block_size):
            block, offset = divmod(slot, block_size)
            stored, scale = pool[block, :, offset].double(), scales[block, :, offset].double()
            if slot in tokens:
                row = x[tokens[slot]].double()
                largest = row.abs().amax(-1, keepdim=True)
                torch.testing.assert_close(scale, largest / INT8_LEVELS, rtol=1e-6, atol=0)
                assert ((stored * scale - row).abs() <= scale * 0.5001).all()
            else:
                assert scale.isnan().all()
                assert (stored == INT8_LEVELS).all()


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
    "int8": Shape(MIXED, cache_dtype=INT8),
    "int8_heads_of_128": Shape(MIXED, cache_dtype=INT8, head_dim=128, num_heads=3, num_kv_heads=3),
    "int8_window_and_softcap": Shape(
        MIXED, cache_dtype=INT8, window=21, softcap=3.0, num_heads=5, num_kv_heads=1, head_dim=80
    ),
    "int8_token_major": Shape(MIXED, cache_dtype=INT8, layout="token_major", block_size=8),
    "int8_block_major": Shape(MIXED, cache_dtype=INT8, layout="block_major", head_dim=16),
    "narrower": Shape(MIXED, cache_dtype=torch.bfloat16),
    "decode_only": Shape(tuple((1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 200))),
    "one_long_prompt": Shape(((150, 150),), num_heads=2, num_kv_heads=2, head_dim=32),
}
