"""The search finds the highest rate, and names the bottleneck that a test has made."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator import capacity, simulate
from benchmarks.simulator.findings.capacity_search import (
    Bottleneck,
    Capacity,
    Objective,
    find_capacity,
)
from benchmarks.simulator.findings.outcome import Outcome
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from benchmarks.simulator.workloads import Workload

WORKER = WorkerModel(find_model("OPT-13B"), find_gpu("A100-40G")).with_calibration(row_s=0.00005)
SHORT = Workload("alpaca-like", 128)
CONFIG = PageStreamConfig(prefix_caching=False, max_model_len=128)
DURATION_S = 4.0


def search(
    config: PageStreamConfig = CONFIG, worker: WorkerModel = WORKER, tpot_s: float = 0.06
) -> Capacity:
    def serve(rate: float, until_s: float) -> Outcome:
        requests = SHORT.requests(rate, DURATION_S, seed=0)
        system = PageStream(worker, config)
        return run(system, requests, worker, until_s=until_s, sample_every_s=0.05)

    objective = Objective(ttft_s=1.0, tpot_s=tpot_s, percentile=90)
    return find_capacity(serve, objective, DURATION_S, 4.0, config.max_num_sequences, 0.1)


def test_the_highest_rate_keeps_the_objective_and_a_tenth_more_does_not() -> None:
    found = search(tpot_s=0.045)
    assert found.best is not None
    assert found.beyond is not None
    assert found.best.keeps
    assert found.best.ttft_s <= 1.0
    assert found.best.tpot_s <= 0.045
    assert not found.beyond.keeps
    assert found.best.rate < found.beyond.rate <= found.best.rate / 0.9
    assert [trial.rate for trial in found.trials] == sorted(trial.rate for trial in found.trials)


def test_a_stricter_objective_leaves_a_lower_rate() -> None:
    strict, lax = search(tpot_s=0.04).best, search(tpot_s=0.05).best
    assert strict is not None
    assert lax is not None
    assert strict.rate < lax.rate


def test_an_objective_that_cannot_be_met_has_no_rate() -> None:
    found = search(tpot_s=0.001)
    assert found.best is None
    assert found.beyond is not None


@pytest.mark.parametrize(
    ("config", "worker", "expected"),
    [
        (replace(CONFIG, kv_slots=640), WORKER, Bottleneck.KV_MEMORY),
        (replace(CONFIG, max_num_sequences=4), WORKER, Bottleneck.SEQUENCES),
        (CONFIG, WORKER, Bottleneck.MEMORY_BANDWIDTH),
        (CONFIG, WORKER.with_calibration(pass_s=0.5), Bottleneck.FIXED_COSTS),
        (CONFIG, WORKER.with_calibration(flops_share=0.002), Bottleneck.COMPUTE),
    ],
)
def test_what_is_in_the_way_is_named(
    config: PageStreamConfig, worker: WorkerModel, expected: Bottleneck
) -> None:
    tpot_s = 0.04 if worker is WORKER else 1.0
    assert search(config, worker, tpot_s).bottleneck is expected


def test_the_command_writes_a_plot_and_the_numbers_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trace", "alpaca-like", "--duration", "3", "--max-model-len", "128", "--json"]
    limits = ["--slo-tpot-ms", "45", "--tolerance", "0.3", "--first-rate", "8"]
    monkeypatch.setattr("sys.argv", ["capacity", *flags, *limits, "--output", str(tmp_path)])
    capacity.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "capacity.json").read_text())
    assert printed["highest_rate"] > 0
    course = printed["at_highest_rate"]
    assert len(course["time_s"]) == len(course["kv_used_percent"]) > 10
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "nowhere"], "--trace='nowhere': neither a file nor one of alpaca-like"),
        (["--trace", "alpaca-like"], "--rate=None: alpaca-like has no arrivals"),
        (["--trace", "alpaca-like", "--gpu", "abacus"], "--gpu='abacus': known are"),
        (["--trace", "alpaca-like", "--tp", "3"], "--tp=3: num_gpus=3: OPT-13B has 40 KV heads"),
        (["--trace", "alpaca-like", "--model", "OPT-66B"], "bytes of weights, 1 x A100-40G have"),
        (
            ["--trace", "alpaca-like", "--max-num-batched-tokens", "16"],
            "max_num_batched_tokens=16 is below",
        ),
    ],
)
def test_options_that_cannot_be_used_are_named(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", *flags])
    with pytest.raises(SystemExit) as exit_info:
        simulate.main()
    assert exit_info.value.code == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
