"""Linear layers by AMX tiles: which tile computes a row, and in which order it is summed."""

import numpy as np
import pytest
import torch

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.weight_packing import pack
from kernels.cpu.runtime.instruction_set import EMULATED, detect

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")


@pytest.fixture(scope="module")
def by_tiles() -> CpuLayers:
    return CpuLayers(EMULATED["amx"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("in_features", [16, 32, 48, 320, 528])
def test_outputs_are_sums_of_32_inputs_after_the_other(
    by_tiles: CpuLayers, in_features: int
) -> None:
    """The order that docs/design/cpu.md states: of 32 inputs, the even ones and the odd ones."""
    weight, x = random(80, in_features), random(3, in_features, seed=1)
    expected = np.zeros((3, 80), np.float32)
    for begin in range(0, in_features, 32):
        halves = np.zeros((2, 3, 80), np.float32)
        for k in range(begin, min(begin + 32, in_features)):
            halves[k % 2] += x[:, k, None].float().numpy() * weight[None, :, k].float().numpy()
        expected += halves[0] + halves[1]
    (out,) = by_tiles.linear(pack([weight]), torch.bfloat16, torch.float32)(x)
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize("in_features", [48, 4096, 20_000])
def test_every_number_of_rows_is_cut_into_tiles_that_cover_it(
    by_tiles: CpuLayers, threads: None, in_features: int
) -> None:
    compiled = by_tiles.linear(pack([random(16, in_features)]), torch.bfloat16, torch.float32)
    x = random(400, in_features, seed=1)
    x[:, 32:] = 0  # sums are short, and reading long rows takes no time
    alone = torch.cat([compiled(row[None])[0] for row in x])
    for num_rows in [*range(1, 70), 96, 97, 128, 129, 160, 161, 191, 192, 193, 385, 400]:
        (out,) = compiled(x[:num_rows])
        assert torch.equal(out, alone[:num_rows]), num_rows


def test_memory_behind_the_rows_is_not_read(by_tiles: CpuLayers) -> None:
    compiled = by_tiles.linear(pack([random(64, 48)]), torch.bfloat16)
    everything = torch.full((40, 48), torch.nan, dtype=torch.bfloat16)
    for num_rows in (1, 15, 17, 31, 33):
        everything[:num_rows] = random(num_rows, 48, seed=1)
        assert compiled(everything[:num_rows])[0].isfinite().all()


def test_a_nan_in_a_weight_stays_in_its_output(by_tiles: CpuLayers) -> None:
    weight = random(80, 48)
    weight[[17, 63, 64], [0, 47, 3]] = torch.nan
    compiled = by_tiles.linear(pack([weight]), torch.bfloat16)
    for num_rows in (1, 20):
        (out,) = compiled(random(num_rows, 48, seed=1))
        assert torch.equal(out.isnan().any(0).nonzero().flatten(), torch.tensor([17, 63, 64]))
        assert out.isnan().all(0).sum() == 3
