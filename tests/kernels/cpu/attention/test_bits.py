"""What the bits of a row may depend on in the numba backend: its own sequence, and nothing else.

A token that is decoded has to get what the same token gets when its prompt is computed again,
in chunks of any length.
"""

import dataclasses

import pytest
import torch

from kernels.cpu.attention.backend import CpuBackend
from kernels.cpu.runtime.instruction_set import Dot, best_dot
from kernels.interface import INT8
from kernels.select import select_backend
from tests.kernels.cases import Case, Shape, make_case

LONGEST_CHUNK = 60
BY_PAIRS = [
    pytest.param(torch.bfloat16, Dot.EMULATED_AMX, id="emulated_amx"),
    # By the instruction where the CPU has it, else by its emulation, from the same code.
    pytest.param(torch.bfloat16, Dot.NATIVE, id="native")
    if best_dot() is Dot.NATIVE
    else pytest.param(torch.bfloat16, Dot.EMULATED, id="emulated"),
]
WAYS = [
    pytest.param(torch.float32, Dot.WIDENED, id="float32"),
    pytest.param(torch.bfloat16, Dot.WIDENED, id="widened"),
    *BY_PAIRS,
]
HEADS = [
    pytest.param(4, 4, id="no_groups"),
    pytest.param(8, 2, id="groups_of_4"),
]


def last_rows(
    backend: CpuBackend, case: Case, num_rows: int, num_sequences: int | None = None
) -> torch.Tensor:
    """The first sequence's last row [H, D], computed with so many rows before it, and with others.

    Args:
        num_sequences: so many of the case's; None: all.
    """
    starts = case.batch.query_starts
    first_rows = int(starts[1])
    rest = case.query[first_rows : int(starts[num_sequences or -1])]
    query = torch.cat((case.query[first_rows - num_rows : first_rows], rest))
    lens, tables = case.batch.context_lens[:num_sequences], case.batch.block_tables[:num_sequences]
    query_starts = starts[: len(lens) + 1] - (first_rows - num_rows)
    query_starts[0] = 0
    batch = dataclasses.replace(
        case.batch, context_lens=lens, block_tables=tables, query_starts=query_starts
    )
    out = torch.empty_like(query)
    backend.attend(query, case.cache, batch, case.params, out)
    return out[num_rows - 1]


def bits_of_last_row(backend: CpuBackend, shape: Shape) -> set[bytes]:
    """What one row gets in chunks of all lengths, alone and in a batch."""
    found = set()
    case = make_case(shape)
    for num_rows in range(1, LONGEST_CHUNK + 1):
        for num_sequences in (1, None):
            row = last_rows(backend, case, num_rows, num_sequences)
            found.add(row.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def batch_of(dtype: torch.dtype, num_heads: int, num_kv_heads: int, **more: object) -> Shape:
    """A row at an odd place, and others that decode or have prompts."""
    return Shape(
        ((LONGEST_CHUNK, 203), (1, 90), (30, 75), (3, 130)),
        num_heads,
        num_kv_heads,
        dtype=dtype,
        padding_rows=0,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("dtype", "way"), WAYS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 37])
def test_a_deterministic_row_has_the_same_bits_in_chunks_of_any_length(
    dtype, way, num_heads, num_kv_heads, softcap, window
):
    backend = CpuBackend(way, deterministic=True)
    shape = batch_of(dtype, num_heads, num_kv_heads, softcap=softcap, window=window)
    assert len(bits_of_last_row(backend, shape)) == 1


@pytest.mark.parametrize(("dtype", "way"), BY_PAIRS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [*HEADS, pytest.param(7, 1, id="group_of_7")]
)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_by_pairs_every_row_has_the_same_bits_in_chunks_of_any_length(
    dtype, way, num_heads, num_kv_heads, softcap, window, head_dim
):
    shape = batch_of(
        dtype, num_heads, num_kv_heads, softcap=softcap, window=window, head_dim=head_dim
    )
    assert len(bits_of_last_row(CpuBackend(way), shape)) == 1


@pytest.mark.parametrize(("dtype", "way"), WAYS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window"), [(4, 4, 80, 37), (8, 2, 64, None)]
)
def test_over_a_cache_in_eight_bits_a_row_has_the_same_bits_in_chunks_of_any_length(
    dtype, way, num_heads, num_kv_heads, head_dim, window
):
    shape = batch_of(
        dtype, num_heads, num_kv_heads, head_dim=head_dim, window=window, cache_dtype=INT8
    )
    assert len(bits_of_last_row(CpuBackend(way, deterministic=True), shape)) == 1


@pytest.mark.parametrize(("dtype", "way"), BY_PAIRS)
def test_by_pairs_rows_of_any_context_have_the_same_bits_alone(dtype, way):
    backend = CpuBackend(way)
    for window in (None, 1, 50):
        whole = make_case(
            Shape(((150, 150),), 4, 2, dtype=dtype, window=window, padding_rows=0, block_size=8)
        )
        together = torch.empty_like(whole.query)
        backend.attend(whole.query, whole.cache, whole.batch, whole.params, together)
        for row in range(150):
            batch = dataclasses.replace(
                whole.batch,
                context_lens=torch.tensor([row + 1], dtype=torch.int32),
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
            )
            query = whole.query[row : row + 1]
            alone = torch.empty_like(query)
            backend.attend(query, whole.cache, batch, whole.params, alone)
            assert torch.equal(alone[0], together[row]), (window, row)


def test_by_elements_few_rows_are_summed_in_another_order():
    assert len(bits_of_last_row(CpuBackend(), batch_of(torch.float32, 4, 4))) > 1


def test_a_deterministic_backend_is_what_is_selected():
    backend = select_backend("cpu", "cpu", torch.float32, deterministic=True)
    assert isinstance(backend, CpuBackend)
    assert len(bits_of_last_row(backend, batch_of(torch.float32, 4, 4))) == 1
