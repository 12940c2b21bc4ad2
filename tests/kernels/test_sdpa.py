"""torch's own attention over sequences that lie in one piece, in place."""

import dataclasses

import pytest
import torch

from kernels.sdpa import SdpaBackend
from tests.kernels.cases import SHAPES, Shape, assert_attends, assert_writes, make_case

PIECE_TOKENS = 512  # no context is longer


@pytest.mark.parametrize("layout", ["layer_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention_over_a_poisoned_pool(name, dtype, layout):
    shape = dataclasses.replace(SHAPES[name], dtype=dtype, layout=layout, block_size=PIECE_TOKENS)
    case = make_case(shape)
    one_column = case.batch.block_tables[:, :1]
    batch = dataclasses.replace(case.batch, block_tables=one_column)
    SdpaBackend().attend(case.query, case.cache, batch, case.params, case.out)
    assert_attends(case)


def test_writes_exactly_the_mapped_slots():
    assert_writes(SdpaBackend(), Shape((), layout="token_major", head_dim=24))


def test_sequences_in_several_blocks_are_refused():
    case = make_case(Shape(((2, 40),)))
    with pytest.raises(ValueError, match="one column expected"):
        SdpaBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
