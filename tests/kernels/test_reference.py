"""The oracle against dense per-sequence attention, and against torch's own."""

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.interface import LayerCache
from kernels.reference import ReferenceBackend
from tests.kernels.cases import (
    SHAPES,
    Shape,
    assert_attends,
    assert_writes,
    eager,
    make_case,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention_over_a_poisoned_pool(name, dtype):
    case = make_case(dataclasses.replace(SHAPES[name], dtype=dtype))
    ReferenceBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    assert_attends(case)


@pytest.mark.parametrize("name", ["mixed_batch", "window_and_softcap"])
def test_float64_is_computed_in_float64(name):
    case = make_case(dataclasses.replace(SHAPES[name], dtype=torch.float64))
    ReferenceBackend().attend(case.query, case.cache, case.batch, case.params, case.out)
    torch.testing.assert_close(case.out, eager(case, torch.float64), rtol=1e-13, atol=1e-13)


def test_the_dense_formula_itself_equals_torchs_attention():
    case = make_case(Shape(((40, 40),), num_heads=6, num_kv_heads=2, padding_rows=0))
    theirs = scaled_dot_product_attention(
        case.query.transpose(0, 1)[None],
        case.keys[0].transpose(0, 1)[None],
        case.values[0].transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(eager(case, torch.float32), theirs[0].transpose(0, 1))


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_exactly_the_mapped_slots(layout, dtype):
    assert_writes(ReferenceBackend(), Shape((), layout=layout, dtype=dtype, head_dim=24))


def test_refuses_arguments_that_do_not_fit():
    case = make_case(Shape(((2, 5),), padding_rows=0))
    attend = ReferenceBackend().attend
    with pytest.raises(ValueError, match="query heads do not share"):
        attend(case.query[:, :3], case.cache, case.batch, case.params, case.out[:, :3])
    with pytest.raises(ValueError, match="are not"):
        attend(case.query[..., :32], case.cache, case.batch, case.params, case.out[..., :32])
    with pytest.raises(ValueError, match="cache"):
        attend(case.query.half(), case.cache, case.batch, case.params, case.out.half())
    long_lens = dataclasses.replace(case.batch, context_lens=case.batch.context_lens.long())
    with pytest.raises(ValueError, match="context_lens"):
        attend(case.query, case.cache, long_lens, case.params, case.out)
    crossed = LayerCache(case.cache.key.transpose(2, 3), case.cache.value.transpose(2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        ReferenceBackend().write_kv(
            case.query[:, :2], case.query[:, :2], crossed, torch.zeros(2, dtype=torch.int64)
        )
