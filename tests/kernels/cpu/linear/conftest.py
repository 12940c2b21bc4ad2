"""Linear layers by this CPU's instructions, and by emulated AMX."""

import pytest

from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import EMULATED, detect


@pytest.fixture(scope="module", params=["detected", "emulated_amx"])
def kernels(request: pytest.FixtureRequest) -> CpuLayers:
    """Layers; for tests that are skipped where there are none."""
    instructions = detect() if request.param == "detected" else EMULATED["amx"]
    assert instructions is not None
    return CpuLayers(instructions)
