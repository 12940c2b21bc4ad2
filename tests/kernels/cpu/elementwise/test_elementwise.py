"""Activations and multiples on CPUs against torch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, relu

from kernels.cpu.elementwise.elementwise import Activation, CpuElements
from kernels.cpu.runtime.thread_team import ThreadTeam

DTYPES = [torch.float32, torch.bfloat16]
FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: relu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
}


@pytest.fixture(scope="module")
def elements() -> CpuElements:
    return CpuElements(ThreadTeam())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return found.mul(3).to(dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(0, 48), (1,), (3, 37), (2, 5, 96), (40, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_equals_float64(
    elements: CpuElements,
    threads: None,
    activation: Activation,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    gated: bool,
) -> None:
    x, factor = random(*shape, dtype=dtype), random(*shape, seed=1, dtype=dtype)
    expected = FUNCTIONS[activation](x.double())
    found = elements.activate(activation, x, factor if gated else None)
    assert found.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    expected = expected * factor if gated else expected
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH])
def test_float32_is_as_exact_as_torchs_own(elements: CpuElements, activation: Activation) -> None:
    x = torch.linspace(-12, 12, 20_001)
    exact = FUNCTIONS[activation](x.double())
    own = (FUNCTIONS[activation](x) - exact).abs().max()
    assert (elements.activate(activation, x) - exact).abs().max() < 1.5 * own


@pytest.mark.parametrize("activation", list(Activation))
def test_an_elements_bits_do_not_depend_on_its_place(
    elements: CpuElements, activation: Activation
) -> None:
    x = random(2000)
    whole = elements.activate(activation, x)
    for first, size in ((0, 1), (5, 1), (17, 15), (1023, 16), (1024, 976), (3, 1030)):
        part = x[first : first + size].clone()
        assert torch.equal(elements.activate(activation, part), whole[first : first + size])


@pytest.mark.parametrize("activation", list(Activation))
def test_far_from_zero_nothing_overflows_and_a_nan_stays(
    elements: CpuElements, activation: Activation
) -> None:
    x = torch.tensor([-1e30, -1e4, -90.0, -1e-30, 0.0, 1e-30, 90.0, 1e4, 1e30, torch.nan])
    found = elements.activate(activation, x)
    expected = FUNCTIONS[activation](x.double())
    torch.testing.assert_close(found[:9].double(), expected[:9], rtol=1e-5, atol=1e-6)
    assert found[9].isnan()


@pytest.mark.parametrize("number", [0.125, 80**-0.5, -3.0])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiples_are_torchs_bit_for_bit(
    elements: CpuElements, dtype: torch.dtype, shape: tuple[int, ...], number: float
) -> None:
    x = random(*shape, dtype=dtype)
    assert torch.equal(elements.scale(x, number), x * number)


def test_operands_that_do_not_fit_are_refused(elements: CpuElements) -> None:
    with pytest.raises(ValueError, match="not alike"):
        elements.activate(Activation.GELU, random(4, 4), random(4, 5))
    with pytest.raises(ValueError, match=r"bfloat16.*not alike"):
        elements.activate(Activation.GELU, random(4).bfloat16(), random(4))
    with pytest.raises(ValueError, match="contiguous"):
        elements.activate(Activation.GELU, random(4, 4).T)
    with pytest.raises(ValueError, match="contiguous"):
        elements.scale(random(4, 4).T, 2.0)
