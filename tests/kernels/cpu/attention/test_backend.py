"""The numba backend against the oracle."""

import dataclasses
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kernels.cpu.attention.backend import CpuBackend
from kernels.cpu.runtime.instruction_set import Dot, best_dot
from kernels.cpu.runtime.thread_team import find_openmp
from kernels.interface import INT8, LayerCache
from kernels.reference import ReferenceBackend
from tests.kernels.cases import (
    SHAPES,
    UNTOUCHED,
    Case,
    Shape,
    assert_attends,
    assert_writes,
    empty_cache,
    make_case,
)

DTYPES = [torch.float32, torch.bfloat16]


# Pairs by the instruction where the CPU has it, else by its emulation, from the same code.
PAIRS = Dot.NATIVE if best_dot() is Dot.NATIVE else Dot.EMULATED
WAYS = sorted({best_dot(), PAIRS, Dot.EMULATED_AMX, Dot.WIDENED}, key=lambda dot: dot.name)


@pytest.fixture(scope="module", params=WAYS)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    """As this CPU multiplies best, and as others do."""
    return CpuBackend(request.param)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attend(backend: CpuBackend, case: Case) -> torch.Tensor:
    backend.attend(case.query, case.cache, case.batch, case.params, case.out)
    return case.out


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention_over_a_poisoned_pool(backend, name, dtype):
    case = make_case(dataclasses.replace(SHAPES[name], dtype=dtype))
    attend(backend, case)
    assert_attends(case)


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    rows_and_past = st.tuples(st.integers(0, 80), st.integers(0, 150))
    decode_and_past = st.tuples(st.just(1), st.integers(0, 150))
    sequences = draw(st.lists(rows_and_past, min_size=1, max_size=4))
    sequences += draw(st.lists(decode_and_past, max_size=20))
    return Shape(
        tuple((rows, rows + past) for rows, past in sequences),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 6)),
        block_size=draw(st.sampled_from([1, 4, 5, 16, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
        cache_dtype=draw(st.sampled_from([None, INT8, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, 200)),
        softcap=draw(st.none() | st.floats(0.5, 50)),
        layout=draw(st.sampled_from(["layer_major", "block_major", "token_major"])),
    )


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    seed=st.integers(0, 9),
    way=st.sampled_from(WAYS),
)
def test_any_ragged_batch_equals_dense_attention(shape, seed, way):
    case = make_case(shape, seed)
    attend(CpuBackend(way), case)
    # Of many random batches some are ones in which torch's own error happens to be tiny.
    assert_attends(case, factor=5.0)


def test_large_logits_and_many_heads_per_group_stay_exact(backend):
    case = make_case(Shape(((1, 90), (3, 50)), num_heads=71, num_kv_heads=1, head_dim=64))
    case.query.mul_(60)
    attend(backend, case)
    assert_attends(case)


def test_head_sizes_that_do_not_fill_vectors_are_served_too(backend):
    case = make_case(Shape(((1, 20), (4, 9)), head_dim=20))
    attend(backend, case)
    assert_attends(case)


def test_a_nan_in_a_visible_key_is_not_hidden(backend):
    for rows in (1, 40):
        case = make_case(Shape(((rows, 40),), padding_rows=0))
        block = case.batch.block_tables[0, 0]
        case.cache.key[block, :, 3] = float("nan")
        assert attend(backend, case)[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(backend, dtype, two_threads):
    case = make_case(Shape(((1, 300), (120, 400), (64, 64)), dtype=dtype))
    together = attend(backend, case).clone()
    torch.set_num_threads(1)
    assert torch.equal(attend(backend, case), together)


def assert_same_alone(
    backend: CpuBackend, many: Case, together: torch.Tensor, num_sequences: int
) -> None:
    """The first sequences get what they got together, bit for bit."""
    for sequence in range(num_sequences):
        first, end = many.batch.query_starts[sequence : sequence + 2].tolist()
        alone = dataclasses.replace(
            many.batch,
            block_tables=many.batch.block_tables[sequence : sequence + 1],
            context_lens=many.batch.context_lens[sequence : sequence + 1],
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
        )
        out = torch.empty_like(together[first:end])
        backend.attend(many.query[first:end], many.cache, alone, many.params, out)
        assert torch.equal(out, together[first:end])


@pytest.mark.parametrize("head_dim", [64, 80])
def test_what_scratch_memory_held_before_does_not_matter(backend, head_dim):
    case = make_case(Shape(((1, 90), (21, 75)), head_dim=head_dim, dtype=torch.bfloat16))
    backend._scratch = torch.full((64 * 1024 * 1024,), 255, dtype=torch.uint8)  # NaNs
    attend(backend, case)
    assert_attends(case)


@pytest.mark.parametrize("window", [None, 37])
def test_the_rest_of_the_batch_does_not_change_a_bit(backend, window):
    many = make_case(Shape(((1, 90), (30, 75)), window=window, padding_rows=0))
    together = attend(backend, many).clone()
    assert_same_alone(backend, many, together, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 12), (80, 20), (15, 5), (64, 1)])
def test_heads_that_share_a_task_compute_what_each_would_alone(
    backend, num_heads, num_kv_heads, window, dtype
):
    lengths = (300, 1, 64, 65, 128, 0, 17, 63, 200, 31, 66, 150) * 3
    sequences = tuple((min(length, 1 + index % 2), length) for index, length in enumerate(lengths))
    shape = Shape(sequences, num_heads, num_kv_heads, window=window, dtype=dtype, padding_rows=0)
    many = make_case(shape)
    together = attend(backend, many).clone()
    assert_attends(many)
    assert_same_alone(backend, many, together, 12)


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
def test_ranks_that_have_some_of_the_heads_each_compute_what_one_computes(backend, layout):
    case = make_case(dataclasses.replace(SHAPES["mixed_batch"], layout=layout))
    attend(backend, case)
    rows = int(case.batch.query_starts[-1])
    for rank in range(2):  # two query heads of one KV head each, in a pool of its own
        heads, kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        cache = LayerCache(case.cache.key[:, kv].clone(), case.cache.value[:, kv].clone())
        query = case.query[:, heads].contiguous()
        out = torch.empty_like(query)
        backend.attend(query, cache, case.batch, case.params, out)
        served = case.out[:rows, heads] != UNTOUCHED
        assert torch.equal(out[:rows][served], case.out[:rows, heads][served])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_a_prompt_is_cut_does_not_change_a_bit(backend, dtype, window):
    whole = make_case(Shape(((200, 200),), padding_rows=0, dtype=dtype, window=window))
    expected = attend(backend, whole).clone()
    for begin, end in ((0, 77), (77, 130), (130, 200)):
        chunk = dataclasses.replace(
            whole.batch,
            context_lens=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        out = torch.empty_like(expected[begin:end])
        backend.attend(whole.query[begin:end], whole.cache, chunk, whole.params, out)
        assert torch.equal(out, expected[begin:end])


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "token_major"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 200])
def test_writes_exactly_the_mapped_slots(backend, layout, dtype, block_size, two_threads):
    shape = Shape((), layout=layout, dtype=dtype, block_size=block_size, head_dim=72)
    assert_writes(backend, shape)


@pytest.mark.parametrize("layout", ["layer_major", "token_major"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_rows_in_eight_bits_with_their_scales(layout, dtype, two_threads):
    assert_writes(CpuBackend(), Shape((), layout=layout, dtype=dtype, cache_dtype=INT8))


def test_writes_float32_rounded_to_bfloat16():
    cache = empty_cache(Shape((), cache_dtype=torch.bfloat16, num_kv_heads=2), num_blocks=1)
    key, value = torch.randn(2, 16, 2, 64)
    CpuBackend().write_kv(key, value, cache, torch.arange(16))
    assert torch.equal(cache.key[0], key.bfloat16().transpose(0, 1))
    assert torch.equal(cache.value[0], value.bfloat16().transpose(0, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_in_eight_bits_that_is_not_finite_is_not_hidden(bad):
    for backend in (CpuBackend(), ReferenceBackend()):
        case = make_case(Shape(((1, 40),), padding_rows=0, cache_dtype=INT8))
        key, value = torch.ones(2, 1, 2, 64)
        key[0, 0, 5] = bad
        slot = 16 * case.batch.block_tables[0, :1].long() + 3
        backend.write_kv(key, value, case.cache, slot)
        backend.attend(case.query, case.cache, case.batch, case.params, case.out)
        assert case.out[0, :2].isnan().all()  # under the first KV head
        assert case.out[0, 2:].isfinite().all()


def test_rows_of_zeros_in_eight_bits_stay_zeros():
    for backend in (CpuBackend(), ReferenceBackend()):
        cache = empty_cache(Shape((), cache_dtype=INT8), num_blocks=1)
        zeros = torch.zeros(16, 2, 64)
        backend.write_kv(zeros, zeros, cache, torch.arange(16))
        assert not any(each.any() for each in cache.tensors)


def test_refuses_a_cache_in_eight_bits_without_scales(backend):
    case = make_case(Shape(((2, 5),), padding_rows=0, cache_dtype=INT8))
    bare = LayerCache(case.cache.key, case.cache.value)
    with pytest.raises(ValueError, match="scales of tokens None None of a cache of"):
        backend.attend(case.query, bare, case.batch, case.params, case.out)


def test_refuses_arguments_that_do_not_fit(backend):
    case = make_case(Shape(((2, 5),), padding_rows=0))
    wrong = dataclasses.replace(case.batch, block_tables=case.batch.block_tables.long())
    with pytest.raises(ValueError, match="block_tables"):
        backend.attend(case.query, case.cache, wrong, case.params, case.out)
    with pytest.raises(ValueError, match="slot_mapping"):
        backend.write_kv(
            case.query[:, :2], case.query[:, :2], case.cache, torch.zeros(2, dtype=torch.int32)
        )


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP runtime differs elsewhere")
def test_kernels_enter_torchs_own_thread_pool():
    assert find_openmp() is not None
