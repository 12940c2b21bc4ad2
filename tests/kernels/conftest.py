"""Fixtures of tests of CPU kernels."""

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect


@pytest.fixture(scope="module")
def kernels() -> CpuLayers:
    """Layers for this CPU's instructions; for tests that are skipped where there are none."""
    instructions = detect()
    assert instructions is not None
    return CpuLayers(instructions)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers of threads, also more than there may be cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
