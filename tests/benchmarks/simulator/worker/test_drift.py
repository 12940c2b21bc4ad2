"""A machine that was slow for a while is slow for as long on the virtual clock."""

import pytest

from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import SimRequest, Work
from benchmarks.simulator.virtual_clock import run
from benchmarks.simulator.worker.drift import DriftingEngine, DriftingWorker, slowdowns
from benchmarks.simulator.worker.fitted_model import FittedWorker, TimedStep
from benchmarks.simulator.worker.model_shapes import find_model

# 10 ms for each iteration, whatever it computes
WORKER = FittedWorker(find_model("OPT-13B"), (0.01, 0.0, 0.0, 0.0), 1_600)


def steps(*durations_ms: int | None) -> list[TimedStep]:
    """Consecutive steps from some time on; None: not timed, half a second."""
    found, now_ms = [], 1_700_000_000_123
    for duration_ms in durations_ms:
        seconds = None if duration_ms is None else duration_ms / 1_000
        found.append(TimedStep(Work(decode_tokens=1), seconds, now_ms))
        now_ms += 500 if duration_ms is None else duration_ms
    return found


def test_each_second_has_the_slowdown_of_its_steps() -> None:
    timed = steps(*[10] * 100, *[20] * 50, None, None, *[5] * 10)
    assert slowdowns(timed, WORKER) == pytest.approx([1.0, 2.0, 2.0, 0.5])


def test_a_machine_at_its_fitted_speed_is_simulated_as_fitted() -> None:
    requests = [SimRequest(number, 0.3 * number, 20, 50) for number in range(20)]
    config = PageStreamConfig()
    fitted = run(PageStream(WORKER, config), requests, WORKER)
    drifting = DriftingWorker(WORKER, [1.0], 0.0)
    found = run(DriftingEngine(drifting, config), requests, drifting)
    assert found.latencies_s.tolist() == fitted.latencies_s.tolist()


def test_what_is_served_in_a_slow_second_takes_longer() -> None:
    # Two requests of ten iterations each; the second of them comes when the machine is slow.
    requests = [SimRequest(0, 5.0, 16, 10), SimRequest(1, 6.5, 16, 10)]
    drifting = DriftingWorker(WORKER, [1.0, 3.0], began_s=5.0)
    found = run(DriftingEngine(drifting, PageStreamConfig()), requests, drifting)
    assert found.latencies_s.tolist() == pytest.approx([0.1, 0.3])
