"""The likeliest outputs by eight bits, against those of the layer itself."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.linear.layers import CpuLayers, CpuLinear
from kernels.cpu.linear.weight_packing import PackedLayers, pack, pack_gated
from kernels.cpu.runtime.instruction_set import Dot, Instructions, choose, detect
from kernels.cpu.sampling import pruned_argmax_arguments as fields
from kernels.cpu.sampling.pruned_argmax import PrunedArgmax, find_pruned_argmax
from kernels.cpu.sampling.pruned_argmax_entry_points import is_served
from kernels.cpu.sampling.quantized_weights import can_quantize, quantize_weights

EMULATED = Instructions("emulated", wide=True, dot=Dot.EMULATED)
MOST_ROWS = 40

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


def kernels_of(name: str) -> CpuLayers:
    if name == "emulated":
        return CpuLayers(EMULATED)
    instructions = detect()
    if instructions is None or not is_served(instructions):
        pytest.skip("this CPU does not multiply bytes by fours and bfloat16 by pairs")
    return CpuLayers(instructions)


@pytest.fixture(scope="module", params=["emulated", "native"])
def served(request: pytest.FixtureRequest) -> CpuLayers:
    """Kernels as on a CPU with the instructions, and with them."""
    return kernels_of(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pruned_argmax_of(kernels: CpuLayers, layers: PackedLayers) -> PrunedArgmax:
    pruned = find_pruned_argmax(kernels, layers, MOST_ROWS)
    assert pruned is not None
    return pruned


def output_layer(kernels: CpuLayers, layers: PackedLayers) -> CpuLinear:
    return kernels.linear(layers, torch.bfloat16, torch.float32)


def check(linear: CpuLinear, pruned: PrunedArgmax, x: torch.Tensor) -> Sequence[int]:
    """Compare with all outputs; returns the rows that were decided."""
    outputs = linear(x)[0].numpy()
    found = pruned(x)
    decided = np.flatnonzero(found.tokens >= 0)
    assert np.array_equal(found.tokens[decided], outputs.argmax(1)[decided])
    assert np.array_equal(found.values[decided], outputs.max(1)[decided])
    assert found.decided == (len(decided) == len(x))
    return decided.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 13, 40])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(2048, 16), (2050, 48), (5003, 272), (4100, 1040)]
)
def test_the_likeliest_are_the_layers(
    served: CpuLayers, threads: None, num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    layers = pack([random(num_outputs, num_inputs)])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    decided: list[int] = []
    for seed in range(3):
        decided += check(linear, pruned, random(num_rows, num_inputs, seed=seed + 1))
    # Of a few inputs many outputs are alike; else nearly all rows are decided.
    assert num_inputs < 256 or len(decided) > 2.5 * num_rows


def test_the_first_of_equal_outputs_is_taken(served: CpuLayers) -> None:
    weight = random(2100, 64)
    x = weight[[1999]]  # the layer's outputs of it are nowhere as large
    weight[[7, 8, 1203, 2099]] = weight[1999].clone()
    layers = pack([weight])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    assert check(linear, pruned, x) == [0]
    assert pruned(x).tokens[0] == 7


def test_outputs_that_bfloat16_would_make_equal_are_distinguished(served: CpuLayers) -> None:
    weight = 0.01 * random(2048, 32)
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight[5], weight[1500] = 1.0, 1.0
    weight[5, 0] = 0.984375  # the sum is 31.984, and would be 32 in bfloat16
    layers = pack([weight])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    assert linear(x)[0][0, 5].bfloat16() == linear(x)[0][0, 1500].bfloat16()
    assert check(linear, pruned, x) == [0]
    assert pruned(x).tokens[0] == 1500


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, MOST_ROWS),
    outliers=st.integers(0, 6),
    factor=st.sampled_from([1.0, 30.0, 1000.0]),
    levels=st.sampled_from([1.0, 0.5, 0.25]),
    scale=st.sampled_from([2.0**-25, 1.0, 2.0**30]),
)
def test_whatever_rows_and_weights_are_like(
    seed: int, num_rows: int, outliers: int, factor: float, levels: float, scale: float
) -> None:
    """Rows with a few large inputs, weights of a few values, so that many outputs are equal."""
    kernels = CpuLayers(EMULATED)
    weight, x = random(2100, 96, seed=seed), random(num_rows, 96, seed=seed + 1)
    if levels < 1:
        weight = (weight.float() / levels).round().clamp(-2, 2).bfloat16() * levels
    x[:, :outliers] *= factor
    layers = pack([weight])
    linear = output_layer(kernels, layers)
    decided = check(linear, pruned_argmax_of(kernels, layers), x * scale)
    assert decided or levels < 1 or outliers


def with_codes_across_the_rest(
    rng: np.random.Generator, size: float
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers up to a size, and the signs of what their codes leave, which are orthogonal to them.

    So nothing of a product of the two is in the codes: all of it is what bounds have to allow for.
    """
    while True:
        numbers = torch.from_numpy(rng.uniform(-1, 1, 64) * size).bfloat16().double().numpy()
        scale = np.abs(numbers).max() / 127
        codes = np.rint(numbers / scale)
        signs = np.where(numbers - scale * codes < 0, -1.0, 1.0)
        if abs((signs * codes).sum()) < 0.5:
            return numbers, signs


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("size", [1e-26, 6e-21, 1e-15, 2e-13, 1e-11, 1e-8, 1.0])
def test_what_is_hidden_from_codes_is_allowed_for(
    served: CpuLayers, size: float, num_rows: int
) -> None:
    rng = np.random.default_rng(0)
    for of_rows in (True, False):
        numbers, signs = with_codes_across_the_rest(rng, size)
        x, largest = (numbers, signs) if of_rows else (signs, numbers)
        weight = np.tile(-np.sign(x) * np.abs(largest), (2048, 1))
        weight[500] = largest
        weight[1500] = 0
        weight[1500, 3] = (x * largest).sum() / 2 / x[3]
        layers = pack([torch.from_numpy(weight).bfloat16()])
        linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
        check(linear, pruned, torch.from_numpy(x).bfloat16().expand(num_rows, 64))


@pytest.mark.parametrize("tiny", [1e-38, 9.2e-41, 1e-30, 1e-28])
def test_a_negligible_remainder_has_no_codes(served: CpuLayers, tiny: float) -> None:
    layers = pack([random(4096, 64)])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 127, tiny
    x[1, 0], x[1, 1:] = 127, tiny
    assert check(linear, pruned, x) == [0, 1]


def test_bounds_are_no_less_than_outputs(served: CpuLayers) -> None:
    layers = pack([random(3000, 400)])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    x = random(20, 400, seed=1)
    x[3] *= 1e-3
    x[7, 5] = 300.0
    outputs = torch.nn.functional.pad(linear(x)[0].double(), (0, 8), value=-torch.inf)
    pruned(x)
    bounds = torch.from_numpy(pruned._bounds[:20, :188]).double()
    largest = outputs.view(20, 188, 16).amax(2)
    assert (bounds >= largest).all()
    sizes = x.double().norm(dim=1, keepdim=True) * 400**0.5
    assert (bounds - largest < 0.1 * sizes).all()  # and say something


def test_rows_with_a_few_large_inputs_have_finer_codes(served: CpuLayers) -> None:
    layers = pack([random(4096, 512)])
    linear, pruned = output_layer(served, layers), pruned_argmax_of(served, layers)
    x = random(30, 512, seed=1)
    x[[2, 29], 100] = 100.0
    check(linear, pruned, x)
    assert pruned._num_residuals[0] == 2
    few = x[: fields.FEW_ROWS]
    check(linear, pruned, few)
    assert pruned._num_residuals[0] == len(few)  # all, since it costs nothing


def test_rows_without_usable_bounds_are_left_to_the_layer(served: CpuLayers) -> None:
    layers = pack([random(2048, 64)])
    pruned = pruned_argmax_of(served, layers)
    x = random(9, 64, seed=1)
    x[1] = 0
    x[2, 3], x[3, 3], x[4, 3] = torch.nan, torch.inf, -torch.inf
    x[5] *= 2.0**-100
    x[6] *= 2.0**100
    found = pruned(x)
    assert not found.decided
    assert (found.tokens[1:7] == -1).all()
    assert (found.tokens[[0, 7, 8]] >= 0).all()


def test_rows_with_too_many_likely_outputs_are_left_to_the_layer(served: CpuLayers) -> None:
    layers = pack([random(1, 64).expand(2048, 64)])
    assert pruned_argmax_of(served, layers)(random(2, 64, seed=1)).tokens.tolist() == [-1, -1]


def test_codes_are_of_finite_weights_of_one_plain_layer(served: CpuLayers) -> None:
    weight = random(2048, 32)
    assert can_quantize(pack([weight]))
    assert not can_quantize(pack([weight[:2047]]))  # too few
    assert not can_quantize(pack([weight], [torch.ones(2048)]))
    assert not can_quantize(pack([weight, weight]))
    assert not can_quantize(pack_gated(weight, weight))
    assert not can_quantize(pack([torch.rand(2048, 32)]))  # of float32
    for value in (torch.nan, torch.inf, 1e20):
        weight = random(2048, 32)
        weight[2000, 31] = value
        assert quantize_weights(pack([weight])) is None
        assert find_pruned_argmax(served, pack([weight]), 4) is None


def test_weights_that_are_zero_are_zero() -> None:
    kernels, weight = CpuLayers(EMULATED), random(2048, 64)
    weight[100:] = 0
    layers = pack([weight])
    linear, pruned = output_layer(kernels, layers), pruned_argmax_of(kernels, layers)
    check(linear, pruned, random(5, 64, seed=1))


def test_what_does_not_fit_is_refused(served: CpuLayers) -> None:
    pruned = pruned_argmax_of(served, pack([random(2048, 32)]))
    for x in (random(2, 48), random(2, 32).float(), random(1, 2, 32)):
        with pytest.raises(ValueError, match=r"expected \[R, 32\] of torch.bfloat16"):
            pruned(x)
    for num_rows in (0, MOST_ROWS + 1):
        with pytest.raises(ValueError, match="1 to 40 are served"):
            pruned(random(num_rows, 32))


def test_cpus_without_the_instructions_are_not_served() -> None:
    bfloat16 = {"avx512f", "avx512bf16", "avx512vl"}
    served = {
        name: is_served(found)
        for name, features in {
            "all": {*bfloat16, "avx512vnni"},
            "no fours": bfloat16,
            "no pairs": {"avx512f", "avx512vnni"},
            "avx2": {"avx2", "fma"},
        }.items()
        if (found := choose(features)) is not None
    }
    assert served == {"all": True, "no fours": False, "no pairs": False, "avx2": False}
