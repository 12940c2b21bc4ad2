"""The Triton backend on a GPU: the interpreter's cases once more, and what only a GPU shows."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.block_cases import LAYOUTS, assert_moves, assert_swaps, make_pool
from tests.kernels.cases import SHAPES, UNTOUCHED, Shape, assert_attends, assert_writes, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from kernels.triton.backend import TritonBackend
    from kernels.triton.block_mover import TritonMover

LONG = ((1, 641), (3, 550), (40, 400), (0, 5), (2, 0), (1, 1), (1, 5000))


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Tensors that a test makes lie there."""
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention_over_a_poisoned_pool(name, dtype):
    case = make_case(dataclasses.replace(SHAPES[name], dtype=dtype))
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    # A GPU's exp2 and log2 are off by two units of float32's last place, where torch's are not.
    assert_attends(case, factor=4.0 if dtype == torch.float32 else 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 400])
def test_contexts_cut_into_pieces_equal_dense_attention(head_dim, dtype, window):
    case = make_case(Shape(LONG, 8, 2, head_dim, dtype=dtype, window=window))
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("scales", [None, (0.5, 0.0625)])
def test_writes_exactly_the_mapped_slots(layout, scales):
    shape = Shape((), layout=layout, dtype=torch.bfloat16, head_dim=80, scales=scales)
    assert_writes(TritonBackend(), shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_and_swaps_exactly_the_listed_blocks(layout):
    assert_moves(TritonMover, make_pool(layout))
    with torch.device("cuda"):
        layers = make_pool(layout)
    with torch.device("cpu"):
        assert_swaps(TritonMover, layers)


def test_a_captured_launch_serves_other_lengths():
    """Captured with one batch, replayed with the lengths and tables of others."""
    backend = TritonBackend()
    shapes = [((1, 900), (1, 40)), ((1, 3), (1, 2000)), ((1, 700), (1, 701))]
    cases = [
        make_case(Shape(sequences, 8, 2, 128, dtype=torch.bfloat16, padding_rows=0), seed)
        for seed, sequences in enumerate(shapes)
    ]
    widest = max(case.batch.block_tables.shape[1] for case in cases)
    deepest = max(case.cache.key.shape[0] for case in cases)
    first = cases[0]
    tables = torch.zeros((2, widest), dtype=torch.int32)
    pool = torch.full((2, deepest, 2, 16, 128), float("nan"), dtype=torch.bfloat16)
    batch = dataclasses.replace(
        first.batch,
        block_tables=tables,
        context_lens=first.batch.context_lens.clone(),
        max_context_len=4096,
    )
    cache = dataclasses.replace(first.cache, key=pool[0], value=pool[1])
    query, out = torch.zeros_like(first.query), torch.zeros_like(first.out)

    def load(case):
        pool.fill_(float("nan"))
        pool[0, : len(case.cache.key)] = case.cache.key
        pool[1, : len(case.cache.value)] = case.cache.value
        tables[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        batch.context_lens.copy_(case.batch.context_lens)
        query.copy_(case.query)
        out.fill_(UNTOUCHED)

    load(first)
    backend.attend(query, cache, batch, first.params, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(query, cache, batch, first.params, out)
    for case in cases:
        load(case)
        graph.replay()
        case.out.copy_(out)
        assert_attends(case)
