"""Chooses the sizes of the KV pools, from settings or from free memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_worker.kv.memory import bytes_per_block
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.gpu_budget import GpuBudget
from shared.errors import SettingsError

_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 * 2**30
_HOST_SHARE = 0.1
_HOST_MOST_BYTES = 4 * 2**30
# More sequences of full length hardly run at once, so that a tiny model gets no huge pool.
_MOST_SEQUENCES = 256
_UNLIMITED = 2**60  # version 1 control groups without a limit report a number above this


def choose_num_blocks(
    settings: WorkerSettings,
    block_bytes: int,
    max_model_len: int,
    gpu: GpuBudget | None = None,
    most_blocks: int | None = None,
    left: int | None = None,
) -> int:
    """Blocks in the pool, from settings or from the memory that is free.

    Args:
        settings: ``num_blocks`` wins over ``kv_memory_bytes``.
        block_bytes: K and V of a block over all layers.
        max_model_len: longest sequence in tokens.
        gpu: the budget of the pool's GPU, which holds the weights already; None: on the CPU.
        most_blocks: that the KV memory can have; None: any number.
        left: bytes that a pool of a given size may take; None: any number.

    Raises:
        SettingsError: not even one block fits, or a given size is too large.
    """
    if settings.num_blocks is not None:
        needed = settings.num_blocks * block_bytes
        _refuse_too_large("--num-blocks", settings.num_blocks, needed, left)
        return settings.num_blocks
    if settings.kv_memory_bytes is not None:
        num_blocks = settings.kv_memory_bytes // block_bytes
        if num_blocks == 0:
            reason = f"one block takes {block_bytes} bytes"
            raise SettingsError("--kv-memory-bytes", settings.kv_memory_bytes, reason)
        given = settings.kv_memory_bytes
        _refuse_too_large("--kv-memory-bytes", given, num_blocks * block_bytes, left)
        return num_blocks
    fitting = _fitting_on_cpu(block_bytes) if gpu is None else gpu.num_blocks(block_bytes)
    num_seqs = max(_MOST_SEQUENCES, settings.max_num_sequences)
    num_blocks = min(fitting, num_seqs * -(-max_model_len // settings.block_size))
    if most_blocks == 0:
        raise SettingsError("--kv-memory", settings.kv_memory, "not one block could be mapped")
    return num_blocks if most_blocks is None else min(num_blocks, most_blocks)


def memory_left(device: torch.device) -> int:
    """Free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def _refuse_too_large(key: str, value: int, needed: int, left: int | None) -> None:
    if left is not None and needed > left:
        reason = f"the pool would take {needed} bytes, and {left} are left"
        raise SettingsError(key, value, reason)


def _fitting_on_cpu(block_bytes: int) -> int:
    budget = min(int(_CPU_SHARE * available_memory()), _CPU_MOST_BYTES)
    if budget < block_bytes:
        reason = f"{budget} bytes are left for a pool whose blocks take {block_bytes}"
        raise SettingsError("--kv-memory-bytes", "auto", reason)
    return budget // block_bytes


def choose_num_host_blocks(
    settings: WorkerSettings, shapes: Sequence[LayerShape], num_blocks: int
) -> int:
    """Blocks in the host pool, from settings or from the memory that is free.

    Args:
        settings: ``num_host_blocks`` wins over ``host_kv_memory_bytes``.
        shapes: the model's attention layers.
        num_blocks: of the device pool; auto takes no larger host pool.

    Raises:
        SettingsError: the given memory does not hold one block.
    """
    if settings.num_host_blocks is not None:
        return settings.num_host_blocks
    each = bytes_per_block(shapes, settings.block_size)
    given = settings.host_kv_memory_bytes
    if given is not None:
        if 0 < given < each:
            raise SettingsError("--host-kv-memory-bytes", given, f"one block takes {each} bytes")
        return given // each
    budget = min(int(_HOST_SHARE * available_memory()), _HOST_MOST_BYTES)
    return min(budget // each, num_blocks)


def available_memory() -> int:
    """Bytes that this process may still allocate, by the system and by its control group."""
    found = [_meminfo_available(), _cgroup_available()]
    known = [size for size in found if size is not None]
    return min(known, default=4 * 2**30)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """Bytes left by a version 2 or version 1 control group; None: no limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if left < _UNLIMITED:
            return max(left, 0)
    return None
