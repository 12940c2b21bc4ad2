"""The Triton kernels of attention and moves, in its interpreter; see tests/support."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.interface import INT8, LayerCache
from kernels.triton import attention_launch
from kernels.triton.backend import TritonBackend
from kernels.triton.block_mover import TritonMover
from kernels.triton.tiles import choose_tile, interpreting
from kernels.triton.work_split import cut_work
from tests.kernels.block_cases import LAYOUTS, assert_moves, assert_swaps, make_pool
from tests.kernels.cases import (
    SHAPES,
    Shape,
    assert_attends,
    assert_writes,
    make_case,
)


def test_the_interpreter_is_on():
    assert interpreting()


# What these vary is varied by others as well; a GPU and the other backends run them all.
REPEATED = {
    "group_of_3", "window_beyond_context", "blocks_of_128", "int8_heads_of_128", "int8_block_major"
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REPEATED])
def test_float32_equals_dense_attention_over_a_poisoned_pool(name):
    case = make_case(SHAPES[name])
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


@pytest.mark.parametrize("name", ["multi_query", "window_and_softcap"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_equal_dense_attention_over_a_poisoned_pool(name, dtype):
    case = make_case(dataclasses.replace(SHAPES[name], dtype=dtype))
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    # The interpreter cuts float32 off where a GPU rounds it to bfloat16.
    assert_attends(case, factor=3.0 if dtype == torch.bfloat16 else 2.0)


# Contexts that are worth several programs, beside some that are not.
LONG = ((1, 641), (3, 550), (40, 400), (0, 5), (2, 0), (1, 1))
SPLIT = {
    "heads": Shape(LONG, head_dim=32),
    "window": Shape(LONG, window=400, head_dim=32, num_kv_heads=1, block_size=32),
    "softcap_and_padded_heads": Shape(
        LONG, softcap=3.0, head_dim=24, num_kv_heads=1, layout="block_major"
    ),
    "half": Shape(LONG, 4, 1, 80, 64, torch.float16, layout="token_major"),
    "quantized": Shape(LONG, 2, 1, 32, dtype=torch.float16, scales=(0.5, 2.0)),
    "int8": Shape(LONG, 2, 1, 32, dtype=torch.float16, cache_dtype=INT8),
    "one_block_per_sequence": Shape(LONG, 4, 1, 16, block_size=1100),
}


@pytest.mark.parametrize("name", SPLIT)
def test_contexts_cut_into_pieces_equal_dense_attention(name):
    case = make_case(SPLIT[name])
    backend = TritonBackend(num_processors=24)
    backend.attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


@pytest.mark.parametrize("name", ["heads", "window", "int8", "one_block_per_sequence"])
def test_contexts_cut_at_fixed_lengths_equal_dense_attention(name):
    case = make_case(SPLIT[name])
    backend = TritonBackend(num_processors=24, fixed_cut=True)
    backend.attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


def alone(case, sequence):
    """One sequence of a case as a batch of its own."""
    first, end = case.batch.query_starts[sequence : sequence + 2].tolist()
    context = int(case.batch.context_lens[sequence])
    batch = dataclasses.replace(
        case.batch,
        block_tables=case.batch.block_tables[sequence : sequence + 1],
        context_lens=torch.tensor([context], dtype=torch.int32),
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        max_query_len=end - first,
        max_context_len=context,
    )
    return batch, slice(first, end)


CROWD = ((1, 1100), (1, 641), (3, 600), (1, 20))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 700)])
def test_with_a_fixed_cut_a_row_is_bit_by_bit_the_same_alone_and_in_a_batch(dtype, window):
    case = make_case(Shape(CROWD, 4, 2, 32, dtype=dtype, window=window, padding_rows=0))
    fixed = TritonBackend(num_processors=3, fixed_cut=True)
    fixed.attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)
    for sequence in range(len(CROWD)):
        batch, rows = alone(case, sequence)
        out = torch.empty_like(case.out[rows])
        fixed.attend(case.query[rows], case.cache, batch, case.params, out)
        assert torch.equal(out, case.out[rows])


def test_without_a_fixed_cut_a_row_depends_on_the_batch():
    """Or the test above could not fail."""
    case = make_case(Shape(CROWD, 4, 2, 32, padding_rows=0))
    free = TritonBackend(num_processors=3)
    free.attend(case.query, case.cache, case.batch, case.params, case.out)
    batch, rows = alone(case, 0)
    out = torch.empty_like(case.out[rows])
    free.attend(case.query[rows], case.cache, batch, case.params, out)
    assert not torch.equal(out, case.out[rows])


def test_pieces_of_many_long_contexts_make_no_grid_too_large_for_cuda(monkeypatch):
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(attention_launch, "paged_attention_kernel", Recorder())
    monkeypatch.setattr(attention_launch, "merge_kernel", Recorder())
    case = make_case(Shape(((1, 9),) * 2048, 16, 8, 32, padding_rows=0))
    bounds = dataclasses.replace(case.batch, max_context_len=131_072)
    backend = TritonBackend(fixed_cut=True)
    query = case.query.to("meta")  # as is the scratch, of a gigabyte
    backend.attend(query, case.cache, bounds, case.params, case.out)
    assert math.prod(grids[0]) == 8 * 2048 * 32
    assert all(max(grid[1:]) <= 65_535 for grid in grids)


def test_a_launch_serves_any_lengths_within_its_bounds():
    """As a captured graph does: bounds of the largest batch, lengths of any."""
    case = make_case(Shape(((1, 40), (1, 333), (5, 20))))
    bounds = dataclasses.replace(case.batch, max_query_len=64, max_context_len=4096)
    TritonBackend().attend(case.query, case.cache, bounds, case.params, case.out)
    assert_attends(case)


def test_pools_of_more_elements_than_int32_counts():
    """Memory that is never touched is never allocated, so the pool costs a few pages."""
    far = 2**31 // (16 * 64) + 3
    pool = torch.empty((far + 1, 16, 1, 64), dtype=torch.float16).transpose(1, 2)
    cache = LayerCache(pool, pool)
    tokens = torch.randn(5, 1, 64).half()
    near = make_case(Shape(((1, 5),), 2, 1, dtype=torch.float16, padding_rows=0))
    backend = TritonBackend()
    backend.write_kv(tokens, tokens, cache, far * 16 + torch.arange(5))
    assert torch.equal(pool[far, 0, :5], tokens[:, 0])
    case = dataclasses.replace(near, cache=cache, keys=[tokens], values=[tokens])
    case.batch.block_tables[0, 0] = far
    backend.attend(case.query, cache, case.batch, case.params, case.out)
    assert_attends(case)
    TritonMover([cache]).copy(torch.tensor([far]), torch.tensor([far - 2]))
    assert torch.equal(pool[far - 2, 0, :5], tokens[:, 0])


@triton.jit
def cut_work_kernel(
    context_lens,
    query_starts,
    tiles_out,
    pieces_out,
    num_seqs,
    window,
    capacity,
    SEQS: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr = 32,
    MIN_PIECE_TILES: tl.constexpr = 8,
):
    tile_tokens: tl.constexpr = 4 if SHORT else 32
    tiles, pieces = cut_work(
        context_lens, query_starts, num_seqs, window, capacity,
        SEQS, tile_tokens, TILE_KEYS, 4, SHORT, HAS_WINDOW, True, MIN_PIECE_TILES, 0, 1,
    )  # fmt: skip
    tl.store(tiles_out + tl.arange(0, SEQS), tiles)
    tl.store(pieces_out + tl.arange(0, SEQS), pieces)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("seed", range(4))
def test_no_batch_has_more_pieces_than_a_launch_has_room_for(short, window, seed):
    torch.manual_seed(seed)
    count, capacity = 60, 27 + 20 * seed
    rows = torch.randint(0, 9 if short else 300, (count,), dtype=torch.int32)
    lens = rows + torch.randint(0, (50, 20_000)[seed % 2], (count,), dtype=torch.int32)
    lens[:3] = torch.tensor([0, 131_072, 1])
    rows[:3] = torch.tensor([2, 3 if short else 200, 1])
    starts = torch.cat((torch.zeros(1), rows.cumsum(0))).int()
    tiles, pieces = torch.zeros(2, 64, dtype=torch.int32)
    cut_work_kernel[(1,)](
        lens, starts, tiles, pieces, count, window or 0, capacity, 64, short, window is not None
    )  # fmt: skip
    served = (lens > 0) & ((rows > 0) & (rows <= 4) if short else rows > 4)
    assert torch.equal(tiles[:count], served * -(-rows // (4 if short else 32)))
    items = tiles * pieces
    most_seqs = count if short else min(count, int(rows.sum()) // 5)
    most_tiles = count if short else int(rows.sum()) // 32 + most_seqs
    assert items.sum() <= most_tiles + capacity
    assert items[pieces > 1].sum() <= 2 * capacity
    assert tiles[pieces > 1].sum() <= capacity
    assert pieces[1] > 1 or window is not None
    assert pieces.max() <= 3 or window is None


@pytest.mark.parametrize(
    ("num_seqs", "context", "per_head"),
    [
        (1, 512, 4), (1, 2048, 16), (1, 32_768, 52),
        (32, 512, 64), (32, 2048, 64), (32, 32_768, 64),
        (256, 512, 256), (256, 2048, 256), (256, 32_768, 256),
    ],
)  # fmt: skip
def test_decodes_are_cut_into_as_many_programs_as_the_table_says(num_seqs, context, per_head):
    """Llama-8B in bfloat16 on an H200; the table is in docs/design/gpu.md."""
    tile = choose_tile(head_dim=128, group=4, dtype=torch.bfloat16, short=True)
    capacity = tile.capacity(num_processors=132, num_kv_heads=8)
    lens = torch.full((num_seqs,), context, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    tiles, pieces = torch.zeros(2, 256, dtype=torch.int32)
    cut_work_kernel[(1,)](
        lens, starts, tiles, pieces, num_seqs, 0, capacity, 256, True, False,
        tile.keys, tile.min_piece_tiles,
    )  # fmt: skip
    assert (tiles * pieces).sum() == per_head


def kernels_launched(monkeypatch, case, num_processors):
    """Names of the kernels that one call of attention launches."""
    names = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: names.append(self.name)

    for name in ("paged_attention_kernel", "merge_kernel"):
        monkeypatch.setattr(attention_launch, name, Recorder(name))
    backend = TritonBackend(num_processors)
    backend.attend(case.query, case.cache, case.batch, case.params, case.out)
    return names


@pytest.mark.parametrize(
    ("sequences", "window", "num_merges"),
    [
        (((1, 128),) * 3, None, 0),  # too short for two pieces
        (((1, 129),), None, 1),
        (((1, 600),), 100, 0),  # what the window leaves is too short
        # With long sequences there may be short ones, whose contexts are cut.
        (((64, 200),), None, 1),
        (((64, 300),), None, 2),
        (((64, 300),) * 24, None, 1),  # the tiles of long ones alone keep all processors busy
    ],
)
def test_where_nothing_can_be_split_nothing_is_merged(monkeypatch, sequences, window, num_merges):
    case = make_case(Shape(sequences, head_dim=32, window=window))
    assert kernels_launched(monkeypatch, case, 24).count("merge_kernel") == num_merges


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_exactly_the_mapped_slots(layout, dtype):
    assert_writes(TritonBackend(), Shape((), layout=layout, dtype=dtype, head_dim=80))


def test_an_empty_batch_is_served():
    case = make_case(Shape(((0, 5), (2, 0)), padding_rows=1))
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


def test_refuses_what_it_cannot_serve():
    case = make_case(Shape(((2, 15),), block_size=12))
    with pytest.raises(ValueError, match=r"12 tokens are no pages, .* not 15 tokens"):
        TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    case = make_case(Shape(((2, 5),), block_size=1100))
    long = dataclasses.replace(case.batch, max_context_len=1101)
    with pytest.raises(ValueError, match=r"1100 tokens .* hold whole sequences, not 1101"):
        TritonBackend().attend(case.query, case.cache, long, case.params, case.out)
    negative = dataclasses.replace(case.params, scale=-1.0)
    with pytest.raises(ValueError, match="must be positive"):
        TritonBackend().attend(case.query, case.cache, case.batch, negative, case.out)


@pytest.mark.parametrize("layout", ["layer_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_rows_in_eight_bits_with_their_scales(layout, dtype):
    shape = Shape((), layout=layout, dtype=dtype, cache_dtype=INT8, head_dim=24)
    assert_writes(TritonBackend(), shape)


def test_writes_what_a_narrower_cache_can_hold():
    assert_writes(TritonBackend(), Shape((), cache_dtype=torch.bfloat16, head_dim=24))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [40, 5])  # words of eight bytes, and of two
def test_moves_exactly_the_listed_blocks_of_all_layers(layout, head_dim):
    assert_moves(TritonMover, make_pool(layout, torch.float16, head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_8_bit_floats_scaled_and_saturated(dtype):
    shape = Shape((), dtype=dtype, scales=(0.5, 0.0625), head_dim=24)
    assert_writes(TritonBackend(), shape)


def test_moves_blocks_that_do_not_fill_a_tile():
    assert_moves(TritonMover, make_pool("layer_major", torch.float32, 96, block_size=40))


@pytest.mark.parametrize("layout", ["layer_major", "block_major"])
def test_what_is_swapped_out_comes_back(layout):
    assert_swaps(TritonMover, make_pool(layout))
