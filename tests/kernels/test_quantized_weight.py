"""Weights in 8 and 4 bits."""

import pytest
import torch

from kernels.quantized_weight import QuantizedWeight, fitting_group_size, quantize


def random_weight(outputs: int = 24, inputs: int = 192) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) * 0.05


def relative_error(weight: torch.Tensor, found: QuantizedWeight) -> float:
    return float((found.dequantize() - weight).norm() / weight.norm())


def test_a_value_is_scale_times_code_plus_minimum() -> None:
    codes = torch.tensor([[-8] * 16 + [7] * 16, [1] * 16 + [0] * 16], dtype=torch.int8)
    scales, minimums = torch.tensor([[2.0, 0.5], [4.0, 8.0]]), torch.tensor([[1.0, 0], [0, 3]])
    found = QuantizedWeight(codes, scales, minimums, 4, 16)
    expected = torch.tensor([[-15.0] * 16 + [3.5] * 16, [4.0] * 16 + [3.0] * 16])
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(found.rows(1, 2).dequantize(), expected[1:])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "most"), [(8, 192, 0.008), (8, 64, 0.007), (4, 32, 0.1), (4, 64, 0.12)]
)
def test_quantized_weights_are_near(
    bits: int, group_size: int, most: float, symmetric: bool
) -> None:
    weight = random_weight()
    found = quantize(weight, bits, group_size, symmetric=symmetric)
    assert (found.minimums is None) == symmetric
    assert found.codes.min() >= -(2 ** (bits - 1))
    assert found.codes.max() <= 2 ** (bits - 1) - 1
    assert relative_error(weight, found) < most
    # So that kernels may keep them in two bytes.
    assert torch.equal(found.scales.half().float(), found.scales)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_searched_scale_has_a_smaller_error_than_the_widest(symmetric: bool) -> None:
    weight = random_weight()
    grouped = weight.unflatten(1, (-1, 32))
    low, high = grouped.aminmax(dim=2, keepdim=True)
    scale = torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15
    minimum = torch.zeros(()) if symmetric else low + 8 * scale
    widest = ((grouped - minimum) / scale).round().clamp(-8, 7) * scale + minimum
    plain = float((widest - grouped).norm() / weight.norm())
    assert relative_error(weight, quantize(weight, 4, 32, symmetric=symmetric)) < 0.95 * plain


def test_rows_are_quantized_alike_alone_and_among_many() -> None:
    weight = random_weight(5000)
    whole = quantize(weight, 4, 64, symmetric=False)
    part = quantize(weight[4000:4007], 4, 64, symmetric=False)
    assert torch.equal(whole.rows(4000, 4007).dequantize(), part.dequantize())


def test_constant_and_tiny_groups_keep_their_values() -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2] = 0.25, torch.linspace(-1e-7, 1e-7, 64)
    for symmetric in (True, False):
        found = quantize(weight, 8, 32, symmetric=symmetric).dequantize()
        assert torch.equal(found[0], weight[0])
        torch.testing.assert_close(found[1:], weight[1:], rtol=0.01, atol=1e-9)


def test_infinite_weights_are_refused() -> None:
    weight = random_weight()
    weight[3, 5] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, 8, 64, symmetric=True)


def test_a_group_size_is_made_to_fit() -> None:
    assert fitting_group_size(768, 128) == 128
    assert fitting_group_size(1056, 64) == 32
    assert fitting_group_size(40, 32) is None


def test_what_does_not_fit_together_is_refused() -> None:
    good = quantize(random_weight(), 4, 32, symmetric=True)
    for codes, scales, bits, group_size in (
        (good.codes, good.scales, 3, 32),
        (good.codes.float(), good.scales, 4, 32),
        (good.codes, good.scales, 4, 36),
        (good.codes, good.scales, 4, 24),
        (good.codes, good.scales, 4, 64),
        (good.codes, good.scales.half(), 4, 32),
    ):
        with pytest.raises(ValueError, match=r"bits|codes|groups|scales"):
            QuantizedWeight(codes, scales, None, bits, group_size)


def test_minimums_near_zero_fit_float16_as_scales_do() -> None:
    weight = random_weight(512)
    found = quantize(weight, 4, 32, symmetric=False)
    assert found.minimums is not None
    assert bool((found.minimums.abs() < 2**-14).any())
    assert torch.equal(found.minimums.half().float(), found.minimums)
