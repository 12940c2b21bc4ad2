"""Savings by sharing: the arithmetic, and one live run that can be counted by hand."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.micro.block_sharing import Case, Row, as_json, as_table, percent_saved
from benchmarks.micro.live_run import RequestFailed, run_live
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from scheduler_svc.core.events import Stats
from scheduler_svc.replay import replay
from scheduler_svc.settings import SchedulerSettings
from shared.messages.requests import Submit
from tests.support.models import tiny_model
from tests.support.requests import submit

PROMPT = 32
OUTPUT = 20


def moment(num_used: int, num_shared: int) -> Stats:
    return Stats(
        num_running=1,
        num_waiting=0,
        num_waiting_tokens=0,
        num_swapped=0,
        num_used_blocks=num_used,
        num_pinned_prefixes=0,
        num_pinned_blocks=0,
        num_pinned_unused_blocks=0,
        num_cached_blocks=0,
        num_shared_blocks=num_shared,
        num_kv_tokens=0,
    )


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    path = tiny_model("llama", tmp_path_factory.mktemp("model"))
    settings = WorkerSettings(
        model=str(path), device="cpu", block_size=16, num_blocks=64, num_host_blocks=0
    )
    return build_worker(settings)


def live(worker: Worker, submits: list[Submit], recording: Path) -> dict[str, list[int]]:
    settings = SchedulerSettings(
        max_num_sequences=8, prefix_caching=False, outputs_retention=100, max_plans_in_flight=1
    )
    return asyncio.run(run_live(worker, settings, submits, recording, lambda: None))


def test_a_step_counts_by_the_blocks_that_it_would_need() -> None:
    assert percent_saved([moment(3, 1)]) == 25
    assert percent_saved([moment(1, 0), moment(3, 1), moment(6, 5)]) == 100 * 6 / 16
    with pytest.raises(ValueError, match="no block"):
        percent_saved([moment(0, 0)])


def test_samples_of_a_live_run_save_their_prompt(worker: Worker, tmp_path: Path) -> None:
    num_samples = 3
    request = submit(
        prompt=range(PROMPT),
        num_choices=num_samples,
        max_tokens=OUTPUT,
        temperature=1.0,
        ignore_eos=True,
    )
    outputs = live(worker, [request], tmp_path / "recording")
    assert len(outputs["r0"]) == OUTPUT
    # The prefill holds the prompt's two blocks once, and samples the first token. Steps that follow
    # write at positions 32 to 50: one block of each sample's own up to 47, then two.
    stats = [moment.stats for moment in replay(tmp_path / "recording")]
    used = [found.num_used_blocks for found in stats]
    assert used == [2, *[2 + num_samples] * 16, *[2 + 2 * num_samples] * 3]
    saved = 2 * (num_samples - 1) * (OUTPUT - 1 + 1)
    assert percent_saved(stats) == pytest.approx(100 * saved / (saved + sum(used)))


def test_beams_of_a_live_run_save_more_than_samples(worker: Worker, tmp_path: Path) -> None:
    def saved(method: str) -> float:
        case = Case("alpaca", method, 4)
        request = submit(prompt=range(5), num_choices=4)
        request = replace(request, sampling=case.sampling(100, seed=1))
        live(worker, [request], tmp_path / method)
        return percent_saved(moment.stats for moment in replay(tmp_path / method))

    assert saved("samples") < 5 < 30 < saved("beams") < 75


def test_a_request_that_is_refused_ends_the_run(worker: Worker, tmp_path: Path) -> None:
    too_wide = submit(num_choices=9)
    with pytest.raises(ExceptionGroup) as raised:
        live(worker, [too_wide], tmp_path / "recording")
    assert raised.value.subgroup(RequestFailed) is not None


def test_the_report_sets_every_case_beside_the_paper() -> None:
    rows = [
        Row(Case("alpaca", "samples", 2), (5.0, 6.0)),
        Row(Case("sharegpt", "beams", 4), (50.0, 60.5)),
    ]
    assert as_json(rows) == {
        "alpaca": {"samples": {"2": {"percent": 5.5, "runs": [5.0, 6.0], "paper_percent": 6.09}}},
        "sharegpt": {
            "beams": {"4": {"percent": 55.25, "runs": [50.0, 60.5], "paper_percent": None}}
        },
    }
    _, first, second = as_table(rows).splitlines()
    assert first.split() == ["alpaca,", "2", "samples", "6.1", "5.5", "5.0", "6.0"]
    assert second.split() == ["sharegpt,", "4", "beams", "-", "55.2", "50.0", "60.5"]
