"""The cache that is filled by prefetches."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.runtime.prefetch import (
    Cache,
    choose_read_once_cache,
    l1_data_cache_bytes,
    read_once_cache,
)


def described(folder: Path, *caches: tuple[str, str, str]) -> Path:
    """A folder as Linux has it: level, type and size of each cache."""
    for index, values in enumerate(caches):
        each = folder / f"index{index}"
        each.mkdir()
        for name, text in zip(("level", "type", "size"), values, strict=True):
            (each / name).write_text(text + "\n")
    return folder


def test_the_l1_data_cache_is_found_among_all_caches(tmp_path: Path) -> None:
    instructions, second = ("1", "Instruction", "64K"), ("2", "Unified", "1024K")
    folder = described(tmp_path, second, instructions, ("1", "Data", "32K"))
    assert l1_data_cache_bytes(folder) == 32 * 1024


@pytest.mark.parametrize("size", ["", "K", "much", "-3K", "1M"])
def test_a_size_that_is_no_number_is_not_known(tmp_path: Path, size: str) -> None:
    assert l1_data_cache_bytes(described(tmp_path, ("1", "Data", size))) is None


def test_a_system_without_those_files_is_no_error(tmp_path: Path) -> None:
    assert l1_data_cache_bytes(tmp_path / "nowhere") is None
    (tmp_path / "index0").mkdir()
    assert l1_data_cache_bytes(tmp_path) is None


def test_a_small_l1_cache_is_passed_over() -> None:
    assert choose_read_once_cache(48 * 1024) is Cache.L1
    assert choose_read_once_cache(32 * 1024) is Cache.L2
    assert choose_read_once_cache(None) is Cache.L2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the assembly is x86's")
@pytest.mark.skipif(detect() is None, reason="this CPU is not served")
def test_decode_attention_prefetches_keys_and_values_to_it(tmp_path: Path) -> None:
    """To the one that this CPU would not choose: a kernel takes ten seconds to compile."""
    size, expected = ("32", {"t1"}) if read_once_cache() is Cache.L1 else ("48", {"nta"})
    code = f"""
import sys, torch
from kernels.cpu.runtime import prefetch
prefetch.l1_data_cache_bytes = lambda: {size} * 1024
from kernels.cpu.attention.attention_kernel import attend_kernel
from kernels.cpu.runtime.instruction_set import Dot
kernel = attend_kernel(torch.bfloat16, Dot.WIDENED, torch.bfloat16)
sys.stdout.write(kernel.code._library.get_asm_str())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"\tprefetch(\w+)", done.stdout)) == expected
