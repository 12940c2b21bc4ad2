"""Normalization on CPUs against torch in float64."""

import pytest
import torch
from torch.nn.functional import layer_norm

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 16), (3, 768), (700, 128)])
def test_normalization_equals_float64(
    kernels: CpuLayers, threads: None, dtype: torch.dtype, num_rows: int, dim: int
) -> None:
    x, weight = random(num_rows, dim).to(dtype), random(dim, seed=1)
    norm = kernels.rms_norm(weight, 1e-5, dtype)
    out = norm(x)
    mean = x.double().pow(2).mean(-1, keepdim=True)
    expected = x.double() * (mean + 1e-5).rsqrt() * weight
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-6)
    assert torch.equal(norm(x[:1]), out[:1])
    assert torch.equal(norm(x.view(1, num_rows, dim)[:, ::2]), out[None, ::2])
    heads = random(1, num_rows, 3, dim, seed=2).to(dtype)
    assert torch.equal(norm(heads.transpose(1, 2)), norm(heads).transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "dim"), [(0, 32), (1, 16), (3, 768), (700, 128)])
def test_normalization_by_mean_and_variance_equals_float64(
    kernels: CpuLayers, threads: None, dtype: torch.dtype, num_rows: int, dim: int
) -> None:
    x, weight, bias = random(num_rows, dim).add(3).to(dtype), *random(2, dim, seed=1)
    norm = kernels.layer_norm(weight, bias, 1e-5, dtype)
    out = norm(x)
    expected = layer_norm(x.double(), (dim,), weight.double(), bias.double(), 1e-5)
    rtol, atol = (1e-5, 5e-6) if dtype == torch.float32 else (2**-8, 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    assert torch.equal(norm(x[:1]), out[:1])


def test_rows_far_from_zero_keep_their_variance(kernels: CpuLayers) -> None:
    x = random(4, 512) + 1000
    ones, zeros = torch.ones(512), torch.zeros(512)
    out = kernels.layer_norm(ones, zeros, 1e-5, torch.float32)(x)
    expected = layer_norm(x.double(), (512,), eps=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_equal_numbers_are_normalized_to_the_bias(kernels: CpuLayers) -> None:
    ones, bias = torch.ones(32), random(32)
    x = torch.full((2, 32), 7.0)
    assert torch.equal(kernels.layer_norm(ones, bias, 1e-6, torch.float32)(x), bias.expand(2, 32))


def test_a_row_of_zeros_is_normalized_to_zeros(kernels: CpuLayers) -> None:
    assert not kernels.rms_norm(torch.ones(32), 1e-6, torch.float32)(torch.zeros(2, 32)).any()
