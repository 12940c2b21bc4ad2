"""The instructions that kernels are compiled for."""

import re
from pathlib import Path

import pytest
from numba.core import config

from kernels.cpu.runtime.instruction_set import EMULATE, choose, detect


def test_instructions_are_the_best_that_the_cpu_has() -> None:
    avx2 = {"avx2", "fma"}
    avx512 = avx2 | {"avx512f", "avx512vl"}
    for features, name in (
        (avx2, "avx2"),
        (avx512, "avx512"),
        (avx512 | {"avx512bf16"}, "avx512_bf16"),
        (avx512 | {"avx512bf16", "amx-tile", "amx-bf16"}, "amx"),
        (avx512 | {"avx512bf16", "amx-tile"}, "avx512_bf16"),
        ({"neon", "fp-armv8"}, "neon"),
    ):
        found = choose(features)
        assert found is not None
        assert found.name == name
    assert choose({"sse2", "avx"}) is None


def test_instructions_are_no_better_than_numba_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EMULATE, raising=False)
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,+fma,-avx512f")
    found = detect()
    assert found is not None
    assert found.name == "avx2"


def test_instructions_that_are_emulated_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATE, "amx")
    found = detect()
    assert found is not None
    assert found.dot.by_amx
    monkeypatch.setenv(EMULATE, "sse9")
    with pytest.raises(ValueError, match=r"EMULATED_INSTRUCTIONS=sse9; expected .*amx"):
        detect()


def test_tests_can_be_run_with_each_of_them() -> None:
    script = (Path(__file__).parents[4] / "scripts" / "test").read_text()
    (base,) = re.findall(r"^avx512=(.*)$", script, re.MULTILINE)
    sets = re.findall(r"^  (\w+)\) set_of=\(\S+ (.*) \w+\)", script, re.MULTILINE)
    assert [name for name, _ in sets] == ["avx2", "avx512", "avx512_bf16", "amx"]
    for name, features in sets:
        named = features.strip('"').replace("$avx512", base).split(",")
        found = choose({each.removeprefix("+") for each in named})
        assert found is not None
        assert found.name == name
