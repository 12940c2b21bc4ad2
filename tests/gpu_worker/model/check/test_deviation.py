"""Deviations that rounding explains, and others."""

import pytest
import torch
from torch import nn

from gpu_worker.model.check.deviation import Deviation, Outputs, judge, may_jump, relative_error

NUM_ROWS, WIDTH = 40, 256
GROUPS = list(torch.arange(NUM_ROWS).chunk(4))
EXACT = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
EXACT[:, 7] *= 1000  # as in trained models, where a few channels are large


def rounded(seed: int, size: float = 1.0) -> torch.Tensor:
    """With an error like that of the type, or a multiple of it."""
    noise = torch.randn(EXACT.shape, generator=torch.Generator().manual_seed(seed))
    return EXACT * (1 + size * 2**-8 * noise)


def verdict(
    found: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    jumps: bool = False,
    is_end: bool = False,
) -> Deviation:
    own = EXACT if dtype == torch.float32 else rounded(1)
    return judge(Outputs("outputs", found, own, EXACT, dtype, jumps, is_end), GROUPS)


def with_rows(found: torch.Tensor, rows: range, value: float = 1.0) -> torch.Tensor:
    """The same outputs, with these rows far off."""
    changed = found.clone()
    changed[list(rows)] += value * EXACT.roll(1, 0)[list(rows)]
    return changed


def test_an_error_counts_beside_the_models_own() -> None:
    assert verdict(rounded(2)).passed
    assert verdict(rounded(2)).ratio == pytest.approx(1, rel=0.35)
    assert not verdict(rounded(2, 4.0)).passed
    assert verdict(rounded(2, 0.0)).ratio < 0.1


def test_a_mistake_in_small_channels_is_not_hidden_by_large_ones() -> None:
    found = rounded(2)
    found[:, 20:60] = found[:, 60:100]
    assert relative_error(found, EXACT) < 0.1
    assert not verdict(found).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_row_may_not_be_far_off(dtype: torch.dtype) -> None:
    found = rounded(2) if dtype == torch.bfloat16 else EXACT * (1 + 1e-6)
    assert verdict(found, dtype).passed
    assert not verdict(with_rows(found, range(11, 12)), dtype).passed


def test_float32_is_judged_by_a_floor() -> None:
    assert verdict(EXACT * (1 + 2e-5), torch.float32).passed
    assert not verdict(EXACT * (1 + 1e-3), torch.float32).passed


def test_with_experts_a_few_rows_may_be_far_off() -> None:
    found = rounded(2)
    assert verdict(with_rows(found, range(0, 40, 8)), jumps=True).passed
    assert not verdict(with_rows(found, range(0, 40, 3)), jumps=True).passed
    assert not verdict(with_rows(found, range(6)), jumps=True).passed  # most of a group
    assert not verdict(with_rows(found, range(1), torch.inf), jumps=True).passed


def test_where_all_errors_come_together_rows_differ_but_not_their_sum() -> None:
    assert verdict(with_rows(rounded(2), range(1), 0.02), is_end=True).passed
    assert not verdict(with_rows(rounded(2), range(0, 40, 5), 1.0), is_end=True).passed
    assert not verdict(with_rows(rounded(2), range(10, 20), 1.0), is_end=True, jumps=True).passed


def test_entries_that_are_masked_must_agree_and_do_not_count() -> None:
    exact = EXACT.clone()
    exact[:, 3] = -torch.inf
    assert judge(Outputs("logits", exact.clone(), exact, exact, torch.float32), GROUPS).ratio == 0
    assert relative_error(exact, exact) == 0
    for wrong in (0.0, torch.nan):
        found = exact.clone()
        found[5, 3] = wrong
        assert not judge(Outputs("logits", found, exact, exact, torch.float32), GROUPS).passed


def test_a_number_that_is_none_does_not_pass() -> None:
    found = rounded(2)
    found[0, 0] = torch.nan
    result = verdict(found)
    assert not result.passed
    assert result.severity == torch.inf


def test_layers_with_experts_are_found_by_their_modules() -> None:
    dense = nn.ModuleDict({"mlp": nn.Linear(2, 2)})
    mixed = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Linear(2, 2)})})
    assert not may_jump(dense, torch.bfloat16)
    assert may_jump(mixed, torch.bfloat16)
    assert not may_jump(mixed, torch.float32)
