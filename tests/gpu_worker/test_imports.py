"""What a worker imports: compiled kernels for CPUs are none of a GPU's business."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import sys


class WithoutNumba:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ImportError(f"a GPU's worker imports {name}")


sys.meta_path.insert(0, WithoutNumba())
import torch

import gpu_worker.model.fusion.gpu_fusion
import gpu_worker.process
import gpu_worker.startup.preload
from gpu_worker.model.quantization.input_rounding import round_inputs
from gpu_worker.ranks.ranks import Ranks
import kernels.triton.block_mover
import kernels.triton.sampling.sampler
from kernels.select import select_backend

gpu = torch.device("cuda")
assert round_inputs(torch.nn.Linear(1, 1), torch.bfloat16, gpu) == 0
Ranks.of(object(), gpu)
assert select_backend("auto", "cuda", torch.bfloat16).name == "triton"
"""


def test_a_worker_on_a_gpu_imports_no_numba() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
