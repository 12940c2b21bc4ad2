"""What is loaded before a worker is forked, without a call to CUDA."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.startup import preload
from shared.kernel_cache import KERNEL_CACHE, kernel_cache

ROOT = Path(__file__).parents[3]

# After any call to CUDA it cannot be used in a fork.
CODE = """
import json, sys, torch

asked = []
for name in ("is_available", "device_count", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
from gpu_worker.__main__ import prepare

prepare()
from kernels.cpu.attention.attention_kernel import attend_kernel
from kernels.cpu.attention.cache_write_kernel import write_kernel

loaded = [attend_kernel.cache_info().currsize, write_kernel.cache_info().currsize]
modules = [name for name in sys.modules if "modeling_" in name]
print(json.dumps({"asked": asked, "kernels": loaded, "modules": modules}))
"""


def prepared(*flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *flags],
        cwd=ROOT,
        env={**os.environ, KERNEL_CACHE: str(kernel_cache())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_models_code_and_the_kernels_are_imported_without_touching_a_gpu() -> None:
    found = prepared("--model", "models/demo", "--device", "cpu", "--dtype", "float32")
    assert found["asked"] == []
    assert found["kernels"] == [1, 1]
    assert "transformers.models.llama.modeling_llama" in found["modules"]


def test_kernels_that_take_long_are_counted_and_those_of_the_cache_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loaded: list[int] = []
    loads = [partial(loaded.append, number) for number in range(3)]
    preload._load_all(loads)
    assert not caplog.records
    monkeypatch.setattr(preload, "_SLOW_S", -1.0)
    preload._load_all(loads)
    assert loaded == [0, 1, 2, 0, 1, 2]
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert fields == [{"done": done, "of": 3} for done in (1, 2, 3)]


def test_for_a_gpu_no_kernel_of_the_cpu_is_loaded() -> None:
    found = prepared("--model", "models/demo", "--device", "cuda")
    assert (found["asked"], found["kernels"]) == ([], [0, 0])


def test_a_model_that_cannot_be_served_is_left_to_the_worker_to_refuse(
    tmp_path: Path,
) -> None:
    found = prepared("--model", str(tmp_path / "nowhere"), "--device", "cpu")
    assert (found["asked"], found["kernels"]) == ([], [0, 0])
