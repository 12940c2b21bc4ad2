"""The Triton kernels in Triton's interpreter; test_triton.py runs this in a process of its own.

The interpreter has to be chosen before Triton is imported, and other tests may have imported it.
"""

import dataclasses

import pytest
import torch

from kernels.triton_backend import TritonBackend
from kernels.triton_mover import TritonMover
from kernels.triton_tiles import interpreting
from tests.kernels.block_cases import LAYOUTS, assert_moves, assert_swaps, make_pool
from tests.kernels.cases import (
    SHAPES,
    Shape,
    assert_attends,
    assert_copies,
    assert_writes,
    make_case,
)


def test_the_interpreter_is_on():
    assert interpreting()


@pytest.mark.parametrize("name", SHAPES)
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


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_exactly_the_mapped_slots(layout, dtype):
    assert_writes(TritonBackend(), Shape((), layout=layout, dtype=dtype, head_dim=80))


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 40])
def test_copies_exactly_the_listed_blocks(layout, dtype, block_size):
    shape = Shape((), layout=layout, dtype=dtype, block_size=block_size, head_dim=80)
    assert_copies(TritonBackend(), shape)


def test_an_empty_batch_is_served():
    case = make_case(Shape(((0, 5), (2, 0)), padding_rows=1))
    TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


def test_refuses_what_it_cannot_serve():
    case = make_case(Shape(((2, 5),), block_size=12))
    with pytest.raises(ValueError, match="block size 12"):
        TritonBackend().attend(case.query, case.cache, case.batch, case.params, case.out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [40, 5])  # words of eight bytes, and of two
def test_moves_exactly_the_listed_blocks_of_all_layers(layout, head_dim):
    assert_moves(TritonMover, make_pool(layout, torch.float16, head_dim))


def test_moves_blocks_that_do_not_fill_a_tile():
    assert_moves(TritonMover, make_pool("layer_major", torch.float32, 96, block_size=40))


@pytest.mark.parametrize("layout", ["layer_major", "block_major"])
def test_what_is_swapped_out_comes_back(layout):
    assert_swaps(TritonMover, make_pool(layout))
