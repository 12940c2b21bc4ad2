"""Which backend is chosen, and what importing one drags in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.select import select_backend

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", [None, "auto", "cpu"])
def test_cpus_get_the_cpu_backend(name):
    assert select_backend(name, "cpu", torch.bfloat16).name == "cpu"


def test_the_reference_serves_any_device_and_type():
    assert select_backend("reference", "mps", torch.float64).name == "reference"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("fast", "cpu", torch.float32, "'fast'"),
        (None, "mps", torch.float32, "'mps'"),
        ("cpu", "cuda", torch.float32, "'cpu' does not serve cuda"),
        ("cpu", "cpu", torch.float64, "float64"),
    ],
)
def test_what_cannot_be_served_is_refused(name, device, dtype, message):
    with pytest.raises(ValueError, match=message):
        select_backend(name, device, dtype)


@pytest.mark.parametrize(
    ("absent", "code"),
    [
        (["triton"], "select_backend(None, 'cpu', torch.float32)"),
        (["triton", "numba"], "select_backend('reference', 'cpu', torch.float32)"),
    ],
)
def test_a_backend_needs_only_its_own_compiler(absent, code):
    hide = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    program = f"import sys, torch\n{hide}from kernels.select import select_backend\n{code}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
