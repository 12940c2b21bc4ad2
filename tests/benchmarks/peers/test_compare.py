"""Servers are compared by medians over all their runs; failed ones are left out."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import compare
from benchmarks.serving.server_process import NotServed

ROOT = Path(__file__).parents[3]


def result(*tokens_per_s: float) -> dict[str, object]:
    figures = {"ttft_ms_p50": 10.0, "tpot_ms_p50": 2.0, "itl_ms_p99": 5.0}
    return {"8": {"runs": [{"output_tokens_per_s": value, **figures} for value in tokens_per_s]}}


def test_rounds_are_merged_to_medians_over_all_runs() -> None:
    merged = compare.merge([result(1.0, 2.0), result(90.0)])
    assert merged["8"]["median"]["output_tokens_per_s"] == 2.0
    assert len(merged["8"]["runs"]) == 3


def test_the_table_has_the_first_server_as_multiples_of_the_others() -> None:
    found = {"ours": compare.merge([result(30.0)]), "peer": compare.merge([result(12.0)])}
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(compare.table(found))
    text = console.export_text()
    assert "ours / peer" in text
    assert "2.50" in text


def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "vllm.sh"
    script.write_text("#!/bin/sh\necho no such model: $1\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(compare, "_HERE", tmp_path)
    with (
        pytest.raises(NotServed, match="no such model"),
        compare.running("vllm", tmp_path, [], start_s=30),
    ):
        pass


def test_an_unknown_server_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.peers.compare", "--model", "x"]
    done = subprocess.run(
        [*command, "--servers", "nobody"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "'nobody' is none of" in done.stderr
