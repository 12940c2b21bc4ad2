"""Which cache memory is brought into ahead of its use."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.runtime.prefetch import Cache, choose_for_read_once, fastest_cache_bytes


def described(folder: Path, *caches: tuple[str, str, str]) -> Path:
    """A folder as Linux has it: level, type and size of each cache."""
    for index, told in enumerate(caches):
        each = folder / f"index{index}"
        each.mkdir()
        for name, text in zip(("level", "type", "size"), told, strict=True):
            (each / name).write_text(text + "\n")
    return folder


def test_the_fastest_cache_is_that_for_data_of_the_first_level(tmp_path: Path) -> None:
    instructions, second = ("1", "Instruction", "64K"), ("2", "Unified", "1024K")
    folder = described(tmp_path, second, instructions, ("1", "Data", "32K"))
    assert fastest_cache_bytes(folder) == 32 * 1024


@pytest.mark.parametrize("size", ["", "K", "much", "-3K", "1M"])
def test_a_size_that_says_nothing_is_not_known(tmp_path: Path, size: str) -> None:
    assert fastest_cache_bytes(described(tmp_path, ("1", "Data", size))) is None


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert fastest_cache_bytes(tmp_path / "nowhere") is None
    (tmp_path / "index0").mkdir()
    assert fastest_cache_bytes(tmp_path) is None


def test_what_does_not_fit_twice_goes_to_the_second_cache() -> None:
    assert choose_for_read_once(48 * 1024) is Cache.FASTEST
    assert choose_for_read_once(32 * 1024) is Cache.SECOND
    assert choose_for_read_once(None) is Cache.SECOND


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the assembly is x86's")
@pytest.mark.skipif(detect() is None, reason="this CPU is not served")
@pytest.mark.parametrize(("size", "expected"), [("48", {"nta"}), ("32", {"t1"})])
def test_decode_attention_brings_keys_and_values_in_there(
    tmp_path: Path, size: str, expected: set[str]
) -> None:
    code = f"""
import sys, torch
from kernels.cpu.runtime import prefetch
prefetch.fastest_cache_bytes = lambda: {size} * 1024
from kernels.cpu.runtime.entry_points import attend_kernel
from kernels.cpu.runtime.instruction_set import Dot
kernel = attend_kernel(torch.bfloat16, Dot.WIDENED)
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
