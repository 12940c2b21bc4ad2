"""The kernel benchmark without a GPU: its tables, its statistics, and a run of tiny cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernels.baselines import ATTENTION
from benchmarks.gpu.kernels.cases import (
    AttentionCase,
    PoolShape,
    full_suite,
    mixed_contexts,
    smoke_suite,
)
from benchmarks.gpu.kernels.report import Baseline, Row, Timing, as_json, as_table
from tests.support.interpreted import needs_interpreter

ROOT = Path(__file__).parent.parent.parent.parent
OURS = Timing(100.0, 90.0, 120.0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_timing_is_the_median_and_its_range():
    assert Timing.of([3.0, 100.0, 1.0]) == Timing(3.0, 1.0, 100.0)
    with pytest.raises(ValueError, match="no measurements"):
        Timing.of([])


def test_bytes_are_counted_once():
    case = AttentionCase("", ((1, 1000), (1, 24)), num_heads=4, num_kv_heads=2, head_dim=8)
    assert case.bytes_moved(2) == 2 * 1024 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2
    assert case.bytes_moved(1) == 2 * 1024 * 2 * 8 + 2 * 2 * 4 * 8 * 2


def test_operations_are_those_of_visible_pairs():
    case = AttentionCase("", ((3, 10), (1, 5)), num_heads=2, num_kv_heads=1, head_dim=4)
    pairs = 8 + 9 + 10 + 5
    assert case.operations() == pairs * 2 * (2 * 4 + 2 * 4)


def test_mixed_contexts_reach_from_low_to_high():
    contexts = mixed_contexts(64, 1024, 32_768)
    assert len(contexts) == 64
    assert (min(contexts), max(contexts)) == (1024, 32_768)


@pytest.mark.parametrize("suite", [full_suite(), smoke_suite()])
def test_the_cases_can_be_built(suite):
    for case in suite.attention:
        assert set(case.baselines) <= set(ATTENTION)
        assert not (case.quantized and case.baselines), "torch cannot attend over 8-bit floats"
        assert all(rows <= context for rows, context in case.sequences)
    assert suite.pool.num_blocks >= 2 * suite.moved_blocks


def test_the_full_cases_cover_all_targets():
    suite = full_suite()
    assert suite.moved_blocks * suite.pool.bytes_per_block >= 64 * 2**20
    assert PoolShape(1, 2, 4, 8, 1).bytes_per_block == 2 * 2 * 4 * 8 * 2
    assert min(suite.written_tokens) >= 4096
    assert any(case.block_size == 16 and case.wanted_share == 0.85 for case in suite.attention)


def test_a_target_is_missed_by_figures_and_by_their_absence():
    slow = Baseline("slow", Timing(300.0, 1, 2), wanted_ratio=2.5)
    fast = Baseline("fast", Timing(50.0, 1, 2), wanted_ratio=1.0)
    broken = Baseline("broken", None, reason="no such thing", wanted_ratio=1.0)
    shown = Baseline("shown", Timing(1.0, 1, 2))
    row = Row("x", OURS, 4 * 10**8, "bytes", 5e12, 0.9, 0.0, (slow, fast, broken, shown))
    assert row.rate == pytest.approx(4e12)
    assert row.missed == ("share 0.80 < 0.90", "fast 0.50 < 1.00", "broken – < 1.00")
    assert Row("x", OURS, 475_000_000, "bytes", 5e12, 0.9).missed == ()


def test_table_and_json_have_the_same_figures():
    baselines = (Baseline("a", Timing(150.0, 1, 2)), Baseline("b", None, reason="it broke"))
    rows = [Row("x", OURS, 10**8, "bytes", 2e12, 0.4, 1e-3, baselines), Row("y", OURS, 1, "bytes")]
    lines = as_table(rows).splitlines()
    assert lines[2] == ("| x | 100.0 (90.0–120.0) | 1.00 TB/s | 0.50 (0.40) | a | 150.0 | 1.50 |")
    assert lines[3] == "|  |  |  |  | b | none: it broke |  |"
    assert len({line.count("|") for line in lines}) == 1
    plain = json.loads(json.dumps(as_json(rows, {"device": "none"})))
    assert plain["rows"][0]["share"] == pytest.approx(0.5)
    assert [entry["ratio"] for entry in plain["rows"][0]["baselines"]] == [1.5, None]


def test_a_part_that_fails_is_named_and_takes_no_other_with_it(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "figures.json"
    program = (
        "import sys, benchmarks.gpu.kernels.__main__ as k, benchmarks.gpu.kernels.cases as c\n"
        "from dataclasses import replace\n"
        "tiny = c.smoke_suite()\n"
        "mapped = replace(tiny.mapped, num_heads=3)\n"  # does not share two KV heads
        "few = replace(tiny, attention=(), written_tokens=(5,), layer_rows=(), mapped=mapped)\n"
        "k.smoke_suite = lambda: few\n"
        f"sys.argv = ['', '--smoke', '--json', {str(file)!r}]\n"
        "sys.exit(k.main())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 2 + 1 + 3 + 6 + 1
    [absent] = figures["absent"]
    assert absent["part"] == "mapped blocks"
    assert "3 query heads do not share 2 KV heads" in absent["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_the_reason():
    done = run()
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stderr


@needs_interpreter
def test_all_of_it_runs_on_tiny_cases(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "figures.json"
    done = run("--smoke", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 + len(smoke_suite().attention) + 1 + 3 + 6 + 4 + 2
    assert json.loads(file.read_text())["absent"] == []
    attention = [row for row in rows if row["error"] is not None]
    assert len(attention) == len(smoke_suite().attention) + 1
    baselines = [baseline for row in rows for baseline in row["baselines"]]
    assert [baseline["reason"] for baseline in baselines if baseline["timing"] is None] == []
