"""Look-alikes have the published means and the shape of public data; traces are played."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator.workloads import Workload
from shared.errors import SettingsError

# Medians and 90th percentiles of the public lengths, and the published means.
SHAPES = {
    "sharegpt-like": ((35, 507, 161.31), (271, 754, 337.99)),
    "alpaca-like": ((15, 32, 19.31), (44, 127, 58.45)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_look_alikes_have_the_shape_of_public_data(name: str) -> None:
    requests = list(Workload(name, 2_048).requests(1_000.0, 20.0, seed=0))
    prompts = np.array([request.prompt_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    assert (prompts + outputs).max() <= 2_048
    for values, (median, upper, mean) in zip((prompts, outputs), SHAPES[name], strict=True):
        assert np.median(values) == pytest.approx(median, rel=0.1)
        assert np.percentile(values, 90) == pytest.approx(upper, rel=0.1)
        assert values.mean() == pytest.approx(mean, rel=0.05)


def test_requests_come_at_the_rate_for_the_time_and_by_the_seed() -> None:
    workload = Workload("alpaca-like", 2_048)
    found = list(workload.requests(50.0, 100.0, seed=1))
    assert len(found) == pytest.approx(5_000, rel=0.05)
    assert found[-1].arrival_s < 100
    assert [request.id for request in found] == list(range(len(found)))
    assert found == list(workload.requests(50.0, 100.0, seed=1))
    assert found != list(workload.requests(50.0, 100.0, seed=2))


def write(tmp_path: Path, arrivals: list[str]) -> str:
    rows = [f"{arrival},{10 + number},5" for number, arrival in enumerate(arrivals)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    return str(path)


def test_a_trace_is_played_at_its_own_rate_or_another(tmp_path: Path) -> None:
    workload = Workload(write(tmp_path, ["0", "1", "2", "4"]), 2_048)
    assert workload.own_rate == 1.0
    own = [request.arrival_s for request in workload.requests(None, 3.0, 0)]
    assert own == [0, 1, 2]
    doubled = [request.arrival_s for request in workload.requests(2.0, 3.0, 0)]
    assert doubled == [0, 0.5, 1, 2]


def test_a_trace_without_arrivals_is_drawn_from_again_and_again(tmp_path: Path) -> None:
    workload = Workload(write(tmp_path, ["", "", "", ""]), 2_048)
    found = [request.prompt_tokens for request in workload.requests(10.0, 10.0, 0)]
    assert len(found) > 50
    assert sorted(found[:4]) == sorted(found[4:8]) == [10, 11, 12, 13]
    with pytest.raises(SettingsError, match="--rate=None"):
        next(workload.requests(None, 10.0, 0))


def test_longer_requests_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, ["0", "1", "2", "3"])
    workload = Workload(path, 16)
    assert workload.num_left_out == 2
    with pytest.raises(SettingsError, match="no request fits into 14 tokens"):
        Workload(path, 14)
