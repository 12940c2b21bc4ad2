"""The reference of linear layers with quantized weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu_worker.model.quantization import quantized_linear
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear, quantize_groups
from kernels.quantized_weight import quantize


def random_linear(outputs: int = 40, inputs: int = 96) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs).requires_grad_(False)


def test_outputs_are_those_of_the_dequantized_weight() -> None:
    own, x = random_linear(), torch.randn(2, 3, 96)
    weight = quantize(own.weight, 4, 32, symmetric=False)
    layer = QuantizedLinear(weight, own.bias)
    expected = functional.linear(x, weight.dequantize(), own.bias)
    torch.testing.assert_close(layer(x), expected)
    narrow = layer(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), expected, rtol=0.02, atol=0.02)


def test_a_weight_that_is_dequantized_in_pieces_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, x = random_linear(), torch.randn(5, 96)
    layer = QuantizedLinear(quantize(own.weight, 8, 96, symmetric=True))
    whole = layer(x)
    monkeypatch.setattr(quantized_linear, "_WEIGHTS_AT_ONCE", 7 * 96)
    torch.testing.assert_close(layer(x), whole)


@pytest.mark.parametrize("size", [96, 32])
def test_inputs_are_rounded_in_their_groups(size: int) -> None:
    own, x = random_linear(), torch.randn(4, 96) * torch.tensor([[1.0], [100], [0], [0.01]])
    weight = quantize(own.weight, 8, 96, symmetric=True, input_group=size)
    codes, scales = quantize_groups(x, size)
    assert codes.shape == (4, 96 // size, size)
    assert torch.equal(codes, codes.round())
    assert torch.equal(codes.abs().amax(2)[:, 0], torch.tensor([127.0, 127, 0, 127]))
    rounded = (codes * scales).flatten(1)
    assert bool(((rounded - x).view_as(codes).abs() <= 0.51 * scales).all())
    found = QuantizedLinear(weight, own.bias)(x)
    torch.testing.assert_close(found, functional.linear(rounded, weight.dequantize(), own.bias))


def test_inputs_are_rounded_later_only_where_the_format_does_not_do_so() -> None:
    own = random_linear(inputs=128)
    free, of_rows = (
        QuantizedLinear(quantize(own.weight, 8, 128, symmetric=True, input_group=group))
        for group in (None, 128)
    )
    assert not free.rounds_inputs
    for layer, expected in ((free, 64), (of_rows, 128)):
        layer.round_inputs()
        assert layer.rounds_inputs
        assert layer.quantized.input_group == expected


def test_scales_stay_exact_in_a_model_that_changes_its_type() -> None:
    own = random_linear()
    weight = quantize(own.weight, 4, 32, symmetric=False)
    model = nn.Sequential(QuantizedLinear(weight, own.bias)).to(torch.bfloat16)
    layer = model[0]
    assert isinstance(layer, QuantizedLinear)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.quantized.dequantize(), weight.dequantize())
    assert "bits=4, group_size=32" in repr(model)
