"""The figures of the papers: reading of curves, rows of tables, and written pages."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper.bench import Curve
from benchmarks.paper.report import Report, Row
from benchmarks.paper.simulation import SystemName, copies_per_step
from benchmarks.paper.workloads import Kind, Workload, lengths
from benchmarks.simulator.worker.beam_samples import BeamDraws
from benchmarks.simulator.worker.worker_model import find_calibration
from shared.errors import SettingsError
from shared.messages.plans import BeamStep


def test_a_sustained_rate_is_read_off_between_two_runs() -> None:
    curve = Curve(SystemName.PAGESTREAM, (1.0, 2.0, 3.0), (0.05, 0.1, 1.0))
    assert curve.sustained(math.sqrt(0.1)) == pytest.approx(2.5)
    assert curve.sustained(0.01) == 1.0, "none was low enough"
    assert curve.sustained(2.0) == 3.0, "all were"


def test_a_row_is_compared_with_the_nearer_end_of_a_range() -> None:
    assert Row("", (1.7, 2.7), 2.0).ratio == 1.0
    assert Row("", (1.7, 2.7), 5.4).ratio == pytest.approx(2.0)
    assert Row("", (4.0,), 3.0).ratio == 0.75
    assert Row("", (), 3.0).ratio is None


def test_a_page_has_a_line_for_each_number() -> None:
    rows = [Row("a", (2.0,), 2.1, "why"), Row("b", (), 0.5)]
    page = Report("fig", "Title", "Setup.", rows, plot="fig.png").markdown()
    assert "| a | 2.00 | 2.10 | 1.05 | why |" in page
    assert "| b | plot only | 0.50 |  |  |" in page
    assert "![Title](fig.png)" in page


@pytest.mark.parametrize("kind", list(Kind))
def test_look_alikes_of_every_kind_arrive_at_the_rate_and_fit_the_model(kind: Kind) -> None:
    found = list(Workload(kind).requests(rate=50.0, duration_s=40.0, seed=1))
    assert len(found) == pytest.approx(2_000, rel=0.1)
    assert found == list(Workload(kind).requests(rate=50.0, duration_s=40.0, seed=1))
    longest = 8_192 if kind is Kind.OPENCHAT else 2_048
    assert max(each.prompt_tokens + each.output_tokens for each in found) <= longest
    assert min(min(each.prompt_tokens, each.output_tokens) for each in found) >= 1


def test_most_prompts_of_conversations_are_cut() -> None:
    pairs = lengths(Kind.CHAT, None)
    assert (pairs[:, 0] == 1_024).mean() > 0.5
    assert pairs.max() == 1_024


def test_more_beams_are_copied_where_there_are_more() -> None:
    found = [copies_per_step(width) for width in (0, 2, 4, 6)]
    assert found[0] == 0.0
    assert found == sorted(set(found))


def test_beams_mostly_draw_alike_and_so_part_for_longer_in_longer_outputs() -> None:
    draws = BeamDraws(np.random.default_rng(0))
    scores, births = np.zeros(4, np.float32), np.zeros(4, np.int64)
    ages = []
    for round_ in range(1, 2_001):
        handles = np.arange(4, dtype=np.int32)
        step = BeamStep(0, handles, scores, handles, handles)
        (found,) = draws.candidates([step], [4], [False])
        scores = found.scores - found.scores.max()
        kept, numbers = np.unique(found.parents, return_counts=True)
        new = np.isin(found.parents, kept[numbers > 1])  # forked here, or going on beside one
        births = np.where(new, round_, births[found.parents])
        ages.append(round_ - births.min())
    assert np.mean(np.array(ages) == 0) > 0.01, "at times all descend from one"
    assert max(ages) > 40, "at times some have been apart for long"


def test_calibrations_differ_in_fixed_costs_only_and_are_found_by_name() -> None:
    paper, modern = find_calibration("paper-2023"), find_calibration("modern")
    assert modern == replace(paper, pass_s=modern.pass_s, row_s=modern.row_s)
    assert (modern.pass_s, modern.row_s) < (paper.pass_s, paper.row_s)
    with pytest.raises(SettingsError, match="modern"):
        find_calibration("of-1983")


def test_pages_are_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.paper", "--quick", "--processes", "0"]
    command += ["--figure", "v8", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    page = (tmp_path / "vattention_table8.md").read_text()
    assert "| Yi-34B, TP-2, 2 MiB | 2048 | 2048 | 1.00 |  |" in page
    assert (tmp_path / "vattention_table8.png").stat().st_size < 100_000


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.paper", "--quick", "--processes", "0"]
    command += ["--trace-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert str(tmp_path) in ended.stderr
