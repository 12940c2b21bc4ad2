"""What LLVM makes of kernels with AMX, on a CPU that has it; none is needed here."""

import os
import platform
import re
import subprocess
import sys

import pytest
from numba.core import config

FEATURES = ("avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512bf16")
AMX = ("amx-tile", "amx-bf16")
COMPILE = """
import sys, torch
from kernels.cpu.runtime.instruction_set import choose
instructions = choose(set(sys.argv[1].split(",")))
{make}
sys.stdout.write(kernel.code._library.get_asm_str())
"""
KERNELS = {
    "linear": """
from kernels.cpu.linear.linear_kernel import linear_kernel
kernel = linear_kernel(torch.bfloat16, torch.bfloat16, instructions)
""",
    "attention": """
from kernels.cpu.attention.attention_kernel import attend_kernel
kernel = attend_kernel(torch.bfloat16, instructions.dot, torch.bfloat16)
""",
}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the assembly is x86's")


@pytest.fixture(scope="module", params=KERNELS)
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kernel compiled for Sapphire Rapids, in a process of its own."""
    features = (*FEATURES, *AMX)
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")),
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
    }
    code = COMPILE.format(make=KERNELS[request.param])
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(features)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loops(text: str) -> list[str]:
    """What stands between a label and the jump back to it, without another jump between them."""
    found, label, body = [], "", list[str]()
    for line in text.splitlines():
        if line.startswith(".LBB"):
            label, body = line.partition(":")[0], []
        elif line.startswith("\tj"):
            if label and line.split()[-1] == label:
                found.append("\n".join(body))
            label = ""
        else:
            body.append(line)
    return found


def test_tiles_are_configured_and_released_and_never_spilled(assembly: str) -> None:
    text = assembly
    used = set(re.findall(r"^\t(tile\w+|ldtilecfg|tdp\w+)", text, re.MULTILINE))
    assert used == {
        "ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"
    }  # fmt: skip
    assert not re.search(r"\ttile(loadd|stored)\t.*%rsp", text)  # no tile on the stack
    # Emulated tiles would multiply by shuffles and vectors.
    assert all("vfmadd" not in body for body in loops(text) if "tile" in body)
    # A function that configures tiles also releases them.
    functions = re.split(r"\n(?=\S+:\n(?:\.L\w+:\n)*\t\.cfi_startproc)", text)
    configuring = [body for body in functions if "\tldtilecfg" in body]
    assert configuring
    for body in configuring:
        assert "\ttilerelease" in body


@pytest.mark.parametrize("assembly", ["linear"], indirect=True)
def test_linear_layers_load_each_tile_once_for_its_products(assembly: str) -> None:
    counts = {
        (body.count("\ttileloadd"), body.count("\ttdpbf16ps"))
        for body in loops(assembly)
        if "tdpbf16ps" in body
    }
    # One tile of rows by four panels has five loads for four products, two by two have four.
    assert {loads / products for loads, products in counts} == {5 / 4, 1.0}


def test_a_cpu_without_amx_or_its_permission_takes_the_next_best(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kernels.cpu.runtime import amx_permission, instruction_set

    monkeypatch.setattr(config, "CPU_FEATURES", ",".join(f"+{name}" for name in (*FEATURES, *AMX)))
    monkeypatch.delenv(instruction_set.EMULATE, raising=False)
    for refused, name in ((None, "amx"), ("error 22", "avx512_bf16")):
        instruction_set._may_use_amx.cache_clear()
        monkeypatch.setattr(amx_permission, "permission_refused", lambda refused=refused: refused)
        found = instruction_set.detect()
        assert found is not None
        assert found.name == name
    instruction_set._may_use_amx.cache_clear()
    (record,) = caplog.records
    assert record.fields == {"because": "error 22"}
    monkeypatch.setattr(config, "CPU_FEATURES", ",".join(f"+{name}" for name in FEATURES))
    found = instruction_set.detect()
    assert found is not None
    assert found.name == "avx512_bf16"
