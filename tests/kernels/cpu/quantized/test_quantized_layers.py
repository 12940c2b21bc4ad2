"""Linear layers on CPUs with weights in 8 and 4 bits, against plain torch."""

from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn.functional import silu

from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from kernels.cpu.linear.layers import CpuLayers, CpuLinear
from kernels.cpu.linear.weight_packing import pack
from kernels.cpu.quantized.packed_format import Products
from kernels.cpu.quantized.quantized_packing import (
    can_pack_quantized,
    pack_quantized,
    pack_quantized_gated,
)
from kernels.cpu.runtime.instruction_set import Dot, Instructions, detect
from kernels.quantized_weight import QuantizedWeight, fitting_group_size, quantize

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

INSTRUCTIONS = {
    "own": detect(),
    "emulated": Instructions("emulated", wide=True, dot=Dot.EMULATED),
    "narrow": Instructions("narrow", wide=False, dot=Dot.WIDENED),
}
FORMATS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int4": lambda weight: quantize(weight, 4, 32, symmetric=False),
    "int8": lambda weight: quantize(weight, 8, weight.shape[1], symmetric=True),
    "int4, groups of inputs": lambda weight: quantize(
        weight, 4, 32, symmetric=False, input_group=32
    ),
    "int8, groups of inputs": lambda weight: quantize(
        weight, 8, weight.shape[1], symmetric=True, input_group=32
    ),
    "int8, rows of inputs": lambda weight: quantize(
        weight, 8, weight.shape[1], symmetric=True, input_group=weight.shape[1]
    ),
}
ROUNDED = [name for name in FORMATS if "of inputs" in name]
BF16_CASES = [
    *((name, "own") for name in ROUNDED),
    ("int4, groups of inputs", "emulated"),
    ("int8, rows of inputs", "emulated"),
    ("int4", "narrow"),
    ("int8, rows of inputs", "narrow"),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kernels_of(name: str) -> CpuLayers:
    instructions = INSTRUCTIONS[name]
    assert instructions is not None
    return CpuLayers(instructions)


def compiled(
    kernels: CpuLayers,
    dtype: torch.dtype,
    *weights: QuantizedWeight,
    biases: tuple[torch.Tensor | None, ...] = (),
    out_dtype: torch.dtype | None = None,
) -> CpuLinear:
    biases = biases or (None,) * len(weights)
    packed = pack_quantized(weights, biases, dtype, kernels.instructions)
    return kernels.linear(packed, dtype, out_dtype)


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each row."""
    return (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)


@pytest.mark.parametrize(("name", "instructions"), BF16_CASES)
def test_rows_in_bfloat16_have_the_products_of_the_reference(name: str, instructions: str) -> None:
    kernels, weight = kernels_of(instructions), FORMATS[name](random(77, 1120) * 0.05)
    bias = random(77, seed=1)
    layer = compiled(kernels, torch.bfloat16, weight, biases=(bias,), out_dtype=torch.float32)
    x = random(40, 1120, seed=2)
    x[3] *= 1000
    x[4, 7] = 3000.0  # an outlier
    x[5] *= 1e-6
    x = x.bfloat16()
    expected = QuantizedLinear(weight, bias)(x.float())
    exact = name not in ROUNDED
    # Rounded rows may be rounded otherwise where a number is halfway between two integers.
    assert errors(layer(x)[0], expected).max() < (2e-4 if exact else 2e-3)
    wide = torch.zeros(1, 1120, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(wide)[0], bias.expand(1, 77))


@pytest.mark.parametrize(("name", "instructions"), BF16_CASES)
def test_a_rows_bits_are_the_same_alone_and_in_any_batch(name: str, instructions: str) -> None:
    kernels = kernels_of(instructions)
    layer = compiled(kernels, torch.bfloat16, FORMATS[name](random(100, 1120)))
    x = random(200, 1120, seed=2).bfloat16()
    (together,) = layer(x)
    for size in (1, 2, 4, 5, 8, 9, 12, 16, 17, 64, 97):
        for first in (0, 200 - size):
            assert torch.equal(layer(x[first : first + size])[0], together[first : first + size])


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("instructions", ["own", "narrow"])
def test_rows_in_float32_have_the_bits_of_a_dequantized_layer(name: str, instructions: str) -> None:
    kernels, weight = kernels_of(instructions), FORMATS[name](random(100, 1120) * 0.05)
    quantized = compiled(kernels, torch.float32, weight)
    dequantized = kernels.linear(pack([weight.dequantize()]), torch.float32)
    for num_rows in (1, 3, 5, 120):
        x = random(num_rows, 1120, seed=num_rows)
        assert torch.equal(quantized(x)[0], dequantized(x)[0])


def test_scales_that_float16_cannot_hold_stay_exact() -> None:
    kernels, weight = kernels_of("own"), random(64, 96)
    weight[1] *= 1e-9
    quantized = quantize(weight, 4, 32, symmetric=False)
    layer = compiled(kernels, torch.float32, quantized)
    assert layer.layers.form is not None
    assert not layer.layers.form.half_scales
    x = random(9, 96, seed=1)
    expected = kernels.linear(pack([quantized.dequantize()]), torch.float32)(x)[0]
    assert torch.equal(layer(x)[0], expected)


def test_layers_that_share_their_input_give_what_each_gives_alone() -> None:
    kernels = kernels_of("own")
    weights = [FORMATS["int4, groups of inputs"](random(n, 96, seed=n)) for n in (64, 33, 130)]
    biases = (random(64), None, random(130))
    x = random(9, 96, seed=5).bfloat16()
    together = compiled(kernels, torch.bfloat16, *weights, biases=biases)(x)
    for weight, bias, out in zip(weights, biases, together, strict=True):
        alone = compiled(kernels, torch.bfloat16, weight, biases=(bias,))
        assert torch.equal(alone(x)[0], out)


def test_gates_and_addends_are_applied_where_they_belong() -> None:
    kernels = kernels_of("own")
    gate, up = (
        FORMATS["int4, groups of inputs"](random(112, 96, seed=seed) / 4) for seed in (0, 1)
    )
    biases = random(112, seed=2), random(112, seed=3)
    x = random(9, 96, seed=4).bfloat16()
    packed = pack_quantized_gated(gate, up, biases, torch.bfloat16, kernels.instructions)
    (out,) = kernels.linear(packed, torch.bfloat16)(x)
    first, second = (
        QuantizedLinear(weight, bias)(x.float())
        for weight, bias in zip((gate, up), biases, strict=True)
    )
    assert errors(out, silu(first) * second).max() < 0.01
    addend = random(9, 112, seed=6).bfloat16()
    (added,) = compiled(kernels, torch.bfloat16, gate)(x, addend)
    assert errors(added, QuantizedLinear(gate)(x.float()) + addend.float()).max() < 0.01


def test_a_nan_stays_in_its_row() -> None:
    x = random(7, 96).bfloat16()
    x[3, 5], x[4, 40] = torch.nan, torch.inf
    for name in ROUNDED:
        layer = compiled(kernels_of("own"), torch.bfloat16, FORMATS[name](random(40, 96)))
        for rows in (x, x[3:5]):
            (out,) = layer(rows)
            is_bad = ~rows.isfinite().all(1)
            assert not out[is_bad].isfinite().any()
            assert out[~is_bad].isfinite().all()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_rows=st.integers(0, 130),
    outputs=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    vectors=st.integers(1, 70),
    group_vectors=st.integers(1, 70),
)
def test_any_shape_is_served(
    num_rows: int, outputs: list[int], vectors: int, group_vectors: int
) -> None:
    in_features, group_size = 16 * vectors, 16 * group_vectors
    if in_features % group_size:
        group_size = in_features
    input_group = fitting_group_size(group_size, 64)
    weights = [
        quantize(random(n, in_features), 4, group_size, symmetric=False, input_group=input_group)
        for n in outputs
    ]
    layer = compiled(kernels_of("own"), torch.bfloat16, *weights)
    x = random(num_rows, in_features, seed=1_000).bfloat16()
    for weight, out in zip(weights, layer(x), strict=True):
        assert out.shape == (num_rows, weight.shape[0])
        expected = QuantizedLinear(weight)(x.float())
        largest = in_features**0.5
        assert bool(((out - expected).abs() <= 2**-7 * expected.abs() + 1e-4 * largest).all())


def test_packed_weights_are_as_small_as_their_codes_and_scales() -> None:
    kernels = kernels_of("own")
    weight = quantize(random(128, 1024), 4, 32, symmetric=False)
    for dtype, input_group in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 32)):
        rounded = replace(weight, input_group=input_group)
        layers = pack_quantized([rounded], [None], dtype, kernels.instructions)
        assert layers.weight.nbytes == 128 * 1024 * 5 // 8  # four bits, and two float16 for 32
        assert layers.form is not None
        assert layers.form.products == Products.FLOAT32 or input_group is not None


def test_weights_of_unlike_formats_are_not_packed_together() -> None:
    four, eight = (quantize(random(16, 64), bits, 32, symmetric=True) for bits in (4, 8))
    assert can_pack_quantized([four, four])
    assert not can_pack_quantized([four, eight])
    odd = quantize(random(16, 40), 8, 40, symmetric=True)
    assert not can_pack_quantized([odd])
    assert not can_pack_quantized([four, replace(four, input_group=32)])
