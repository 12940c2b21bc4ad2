"""Memory of pools: zeros, and no pages before they are touched."""

from pathlib import Path

import pytest
import torch

from gpu_worker.kv.zeroed_memory import zeroed

CPU = torch.device("cpu")
MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the test reads /proc")
def test_pages_are_taken_when_they_are_touched() -> None:
    before = resident_bytes()
    pool = zeroed((2, 64, MIB), torch.uint8, CPU)
    assert resident_bytes() - before < 16 * MIB
    pool[1] = 7
    assert resident_bytes() - before > 48 * MIB
    assert (int(pool[0].max()), int(pool[1].min())) == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(2, 3, 5), (0, 4)])
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = zeroed(shape, dtype, CPU)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype))
    found += 1
    assert torch.equal(found, torch.ones(shape, dtype=dtype))
