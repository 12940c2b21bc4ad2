"""The KV pool's share of a GPU: the arithmetic, and the measured step."""

import numpy as np
import pytest
import torch

from gpu_worker.kv.allocation import PagedAllocator
from gpu_worker.kv.pool_sizes import choose_num_blocks
from gpu_worker.sampling.penalties import Penalties
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.gpu_budget import GpuBudget, StepMemory
from gpu_worker.startup.step_profile import StepProfile, sample_all
from gpu_worker.step.buckets import Bucket
from shared.errors import SettingsError
from tests.gpu_worker.conftest import MakeWorker

GIB = 2**30
STEP = StepMemory(activation_bytes=3 * GIB, graph_bytes=GIB)


def budget(
    used: int = 20 * GIB, step: StepMemory = STEP, utilization: float = 0.9, total: int = 80 * GIB
) -> GpuBudget:
    return GpuBudget(total, used, 16 * GIB, step, utilization)


def test_the_pool_gets_what_everything_else_leaves_of_the_share() -> None:
    left = budget().pool_bytes
    assert 48 * GIB - 0.5 * GIB < left < 48 * GIB  # 72 - 20 - 3 - 1, and a reserve
    assert budget(used=25 * GIB).pool_bytes == left - 5 * GIB
    assert budget(step=StepMemory(4 * GIB, GIB)).pool_bytes == left - GIB
    assert budget(step=StepMemory(3 * GIB, 0)).pool_bytes == left + GIB
    assert budget(utilization=0.8).pool_bytes == left - 8 * GIB
    assert budget().num_blocks(2**20) == left // 2**20


@pytest.mark.parametrize("used", [70 * GIB, 79 * GIB])
def test_no_memory_left_is_an_error_with_the_setting_and_the_users_of_memory(used: int) -> None:
    with pytest.raises(SettingsError) as raised:
        budget(used=used).num_blocks(2**20)
    message = str(raised.value)
    assert raised.value.key == "--gpu-memory-utilization"
    for part in (
        "0.9",
        "72.00 GiB",
        "weights 16.00",
        f"besides {used / GIB - 16:.2f}",
        "step 3.00",
    ):
        assert part in message, message
    assert "CUDA graphs 1.00" in message
    assert "--max-num-batched-tokens" in message


def test_a_number_of_blocks_or_bytes_wins_over_the_share() -> None:
    full = budget(used=80 * GIB)
    assert choose_num_blocks(WorkerSettings(num_blocks=7), 4096, 512, full) == 7
    assert choose_num_blocks(WorkerSettings(kv_memory_bytes=40960), 4096, 512, full) == 10
    with pytest.raises(SettingsError, match="gpu-memory-utilization"):
        choose_num_blocks(WorkerSettings(), 4096, 512, full)


def test_a_tiny_model_does_not_take_the_whole_gpu() -> None:
    settings = WorkerSettings(block_size=8)
    assert choose_num_blocks(settings, 4096, 512, budget()) == 256 * 512 // 8
    assert choose_num_blocks(settings, 2**30, 512, budget()) == budget().pool_bytes // 2**30


def test_the_largest_step_is_run_without_a_pool(make_worker: MakeWorker) -> None:
    worker = make_worker("llama", block_size=8)
    executor = worker.executor
    shapes = executor._model.observe_layers()
    allocator = PagedAllocator(8, torch.device("cpu"))
    backend = executor.runner._backend  # type: ignore[attr-defined]
    profile = StepProfile(executor._model, shapes, backend, allocator, 512)
    logits = profile.compute(Bucket(500, 40, False))
    assert logits.shape == (40, worker.model.vocab_size)
    kept = logits.clone()
    penalties = Penalties(worker.model.vocab_size, 40, torch.device("cpu"))
    penalties.allocate(40)
    sample_all(logits, penalties)
    assert np.array_equal(logits.numpy(), kept.numpy(), equal_nan=True)
    profile.close()
