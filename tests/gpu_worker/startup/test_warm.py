"""Kernels that are compiled before any start."""

import os
import subprocess
import sys
from pathlib import Path

from shared.kernel_cache import KERNEL_CACHE, kernel_cache

ROOT = Path(__file__).parents[3]

# What a start loads has to come out of the cache.
CODE = """
import sys

from gpu_worker.startup import warm

code = warm.main(sys.argv[1:])
import torch
from kernels.cpu.attention.attention_kernel import attend_kernel
from kernels.cpu.attention.cache_write_kernel import write_kernel
from kernels.cpu.quantized.quantized_kernel import quantized_kernel
from kernels.cpu.runtime.instruction_set import best_dot

sizes = [each.cache_info().currsize for each in (attend_kernel, write_kernel, quantized_kernel)]
print(code, sizes, attend_kernel(torch.float32, best_dot(), torch.int8).address != 0)
"""

OPTIONS = ["--dtype", "float32", "--kv-dtype", "int8", "--weights", "int4"]


def test_every_kernel_is_compiled_and_named() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CODE,
            *["--dtype", "float32", "--kv-dtype", "int8", "--weights", "int4"],
        ],
        cwd=ROOT,
        env={**os.environ, KERNEL_CACHE: str(kernel_cache())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *kernels, last, result = done.stdout.splitlines()
    number = int(first.split()[0])
    assert first.endswith(f"in {kernel_cache()}")
    assert len(kernels) == number
    assert kernels[0].startswith(f"[1/{number}] ")
    assert any("attention, float32 over int8" in line for line in kernels)
    assert any("linear layers, float32 by weights in int4" in line for line in kernels)
    assert last.startswith("done in ")
    assert result == "0 [1, 1, 1] True"


def test_a_type_without_kernels_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker.startup.warm", "--kv-dtype", "fp8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--kv-dtype: invalid choice: 'fp8'" in done.stderr
