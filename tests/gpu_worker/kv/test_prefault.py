"""Prefaulting takes a pool's pages ahead of need, and keeps their contents."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch

from gpu_worker.kv import prefault as prefault_module
from gpu_worker.kv.prefault import prefault
from gpu_worker.kv.zeroed_memory import zeroed
from kernels.interface import LayerCache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is done")

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def layers() -> tuple[torch.Tensor, list[LayerCache]]:
    """A pool, and the keys and values of two layers in it."""
    pool = zeroed((2, 2, 8, 1, 16, MIB // 16 + 64), torch.uint8, torch.device("cpu"))
    return pool, [LayerCache(*layer) for layer in pool]


def idle() -> bool:
    return False


async def test_all_memory_is_taken_and_nothing_written() -> None:
    pool, caches = layers()
    pool[1, 0, 3, 0, 5] = 7
    expected = pool[1].clone()
    before = resident_bytes()
    await prefault(caches, idle)
    assert resident_bytes() - before > 0.9 * pool.nbytes - 4 * MIB
    assert torch.equal(pool[1], expected)
    assert not pool[0].any()


async def test_nothing_is_taken_while_there_is_something_to_do() -> None:
    pool, caches = layers()
    looked, before = 0, resident_bytes()

    def busy() -> bool:
        nonlocal looked
        looked += 1
        if looked == 2:
            task.cancel()
        return True

    task = asyncio.create_task(prefault(caches, busy))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert resident_bytes() - before < 4 * MIB
    assert not pool.any()


async def test_memory_that_others_need_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, caches = layers()
    monkeypatch.setattr(prefault_module, "available_memory", lambda: 2**29)
    before = resident_bytes()
    with caplog.at_level("INFO"):
        await prefault(caches, idle)
    assert "taken when needed" in caplog.text
    assert resident_bytes() - before < 4 * MIB
    assert not pool.any()


async def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, caches = layers()
    monkeypatch.setattr(prefault_module, "_MADV_POPULATE_WRITE", 9_999)
    await prefault(caches, idle)
    assert not pool.any()
