"""The Triton kernels around attention on a GPU: the interpreter's tests, and what only it shows."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton import layers
from tests.kernels.triton.interpreted_layers import (  # noqa: F401 - collected here, too
    DTYPES,
    random,
    test_gates_are_applied,
    test_heads_inside_longer_rows_are_normalized_in_place_of_copies,
    test_linear_layers_of_independent_rows,
    test_queries_and_keys_are_turned,
    test_rows_are_normalized,
    test_sums_are_stored_and_normalized,
    test_turned_keys_are_stored_as_by_two_launches_in_exactly_the_mapped_slots,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Tensors that a test makes lie there."""
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_neither_on_the_others_nor_on_its_place(dtype: torch.dtype) -> None:
    x, weight = random(300, 1000, dtype=dtype), random(520, 1000, dtype=dtype, seed=1)
    factor = torch.ones(1000)
    linear = layers.linear(x, weight, None)
    norm = layers.rms_norm(x, factor, 1e-6)
    for first, end in ((0, 1), (33, 34), (2, 69), (17, 300), (299, 300)):
        rows = x[first:end]
        assert torch.equal(layers.linear(rows, weight, None), linear[first:end])
        assert torch.equal(layers.rms_norm(rows, factor, 1e-6), norm[first:end])
