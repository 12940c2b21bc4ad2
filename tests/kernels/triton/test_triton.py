"""The Triton backend without a GPU: interpreted for its results, compiled for its resources."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.interpreted import assert_passes_interpreted, needs_interpreter, run_python

pytest.importorskip("triton")

FOLDER = Path(__file__).parent


@needs_interpreter
def test_the_kernels_pass_in_the_interpreter():
    names = ("interpreted_kernels.py", "interpreted_layers.py", "interpreted_sampling.py")
    assert_passes_interpreted(*(FOLDER / name for name in names))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_sm_90_without_spills(tmp_path):
    file = str(FOLDER / "compile_kernels.py")
    done = run_python(file, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    attention = [report for report in reports if report["kernel"] in ("decode", "prefill")]
    assert len(reports) == 55
    assert len(attention) == 25
    assert {report["head_dim"] for report in attention} == {64, 80, 96, 128, 256}
    assert {report["block_size"] for report in attention} == {8, 16, 32, 64, 128, 256}
    for report in reports:
        assert report["stack_bytes"] == 0, report
        assert report["shared_bytes"] <= 227 * 1024, report
        assert report["global_16_bytes"] > 0, report
    linear = [report for report in reports if report["kernel"] == "linear"]
    assert {(bool(report["wgmma"]), report["dtype"]) for report in linear} == {
        (True, "bfloat16"), (True, "float16"), (False, "float32"),
    }  # fmt: skip
    for report in (*attention, *linear):
        assert report["async_copies_16_bytes"] > 0, report
    for report in attention:
        if report["dtype"] != "float32":
            tensor_cores = "mma" if report["kernel"] == "decode" else "wgmma"
            assert report[tensor_cores] > 0, report
        if report["cache"] == report["dtype"]:
            # The work is cut for so many programs on one processor: they have to fit.
            assert report["at_once"] * report["threads"] * report["registers"] <= 65_536, report
            assert report["at_once"] * (report["shared_bytes"] + 1024) <= 228 * 1024, report
