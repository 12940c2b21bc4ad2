"""What rounding explains, and what it does not."""

import pytest
import torch

from gpu_worker.deviation import CheckResult, judge, row_errors
from gpu_worker.loader import load_model
from gpu_worker.settings import WorkerSettings
from tests.gpu_worker.conftest import ModelPath

CPU = torch.device("cpu")
NUM_TOKENS = 30
TOKENS = torch.randint(4096, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


def verdict(path: str, dtype: str, errors: torch.Tensor) -> CheckResult:
    model = load_model(WorkerSettings(model=path, dtype=dtype), CPU)
    expected = model.eager_logits(TOKENS)
    result = judge(model, [TOKENS], [expected], [errors], errors.chunk(3))
    assert torch.equal(model.eager_logits(TOKENS), expected)  # nothing is left behind
    return result


def far_off(num_rows: int, error: float = 1.0) -> torch.Tensor:
    """Errors [T] of which some, spread over all, are large."""
    errors = torch.full((NUM_TOKENS,), 1e-4)
    errors[:: NUM_TOKENS // num_rows] = error
    return errors


@pytest.mark.parametrize(
    ("kind", "dtype", "passes"),
    [
        ("phimoe", "bfloat16", True),
        ("phimoe", "float32", False),
        ("llama", "bfloat16", False),  # rounding moves no row of it far
        ("gemma2", "bfloat16", False),
    ],
)
def test_few_rows_may_be_far_off_where_rounding_moves_the_models_own(
    kind: str, dtype: str, passes: bool, model_path: ModelPath
) -> None:
    assert verdict(str(model_path(kind)), dtype, far_off(3)).passed == passes
    assert not verdict(str(model_path(kind)), dtype, far_off(3, torch.inf)).passed
    assert not verdict(str(model_path(kind)), dtype, far_off(10)).passed


def test_most_rows_of_a_group_must_be_right(model_path: ModelPath) -> None:
    errors = torch.full((NUM_TOKENS,), 1e-4)
    errors[10:16] = 0.3  # together less than a few rows that are far off
    result = verdict(str(model_path("phimoe")), "bfloat16", errors)
    assert result.deviation < verdict(str(model_path("phimoe")), "bfloat16", far_off(3)).deviation
    assert not result.passed


def test_entries_that_are_masked_must_agree_and_do_not_count() -> None:
    expected = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, 3.0]])
    assert row_errors(expected, expected).tolist() == [0.0, 0.0]
    found = expected.clone()
    found[0, 2] = 0.0
    found[1, 0] = torch.nan
    assert row_errors(found, expected).tolist() == [torch.inf, torch.inf]
