"""Compiled by mypyc, the simulator and the scheduler core do the same as their sources."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.mypyc_build import ROOT, CannotCompileError, compile_into, environment

_SIMULATE = (
    *(
        "-m",
        "benchmarks.simulator.simulate",
        "--trace",
        "sharegpt-like",
        "--rate",
        "3",
        "--duration",
        "40",
    ),
    *("--max-num-batched-tokens", "512", "--json"),
)
_HOW_FAST = ("wall_s", "times_faster_than_real")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with compiled modules, compiled quickly: not optimized."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None or importlib.util.find_spec("mypyc") is None:
        pytest.skip(f"there is no mypyc, or no C compiler {compiler}")
    place = tmp_path_factory.mktemp("cache") / "compiled"
    compile_into(place, optimization=0)
    return place


def _output_of(command: tuple[str, ...], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _numbers(command: tuple[str, ...], env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_output_of(command, env))
    return {name: value for name, value in found.items() if name not in _HOW_FAST}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_run_gives_the_same_numbers_as_with_the_sources(compiled: Path, preemption: str) -> None:
    command = (*_SIMULATE, "--preemption", preemption)
    imported = ("-c", "from benchmarks.simulator.simulate import main; main()", *command[2:])
    expected = _numbers(imported, os.environ)
    assert expected["preemptions"] > 10
    assert _numbers(command, environment(compiled)) == expected


def test_random_walks_find_nothing_wrong_with_the_compiled_core(compiled: Path) -> None:
    where = "import scheduler_svc.core.step.planner as found; print(found.__file__)"
    assert Path(_output_of(("-c", where), environment(compiled)).strip()).suffix == ".so"
    walks = ("-m", "tests.support.walks.run", "--first-seed", "7", "--steps", "5000")
    _output_of(walks, environment(compiled))


def test_without_a_compiler_it_fails_with_the_reason_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CannotCompileError, match="no-such-compiler is not on PATH"):
        compile_into(tmp_path / "compiled")
    assert list(tmp_path.iterdir()) == []


def test_a_command_prints_that_it_runs_interpreted_if_nothing_was_compiled(tmp_path: Path) -> None:
    """Run in a copy of the sources, because their path is part of a compiled folder's name."""
    for package in ("benchmarks", "scheduler_svc", "shared"):
        shutil.copytree(ROOT / package, tmp_path / package)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulator.simulate", "--trace", "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "runs interpreted" in done.stderr
    assert "neither a file nor one of" in done.stderr
    assert done.returncode == 1
