"""The choice of tokens on a GPU: the interpreter's tests, with compiled kernels."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.triton.interpreted_sampling import (  # noqa: F401 - collected here
    test_banned_tokens_are_never_sampled,
    test_broken_rows_get_the_argmax_of_their_numbers,
    test_equal_logits_are_kept_or_rejected_together,
    test_penalties_are_those_of_the_reference,
    test_the_first_of_equal_logits_is_the_argmax,
    test_tokens_are_those_of_the_reference,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Tensors that a test makes lie there."""
    with torch.device("cuda"):
        yield
