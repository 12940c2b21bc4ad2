"""Costs that durations were made from are found again."""

import numpy as np
import pytest

from benchmarks.simulator.fitted import TimedStep, TooShort, fit
from benchmarks.simulator.models import find_model
from benchmarks.simulator.system import Work

MODEL = find_model("OPT-13B")


def steps(costs_s: tuple[float, float, float, float], noise_s: float) -> list[TimedStep]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(500):
        prefill, decode, context = (int(value) for value in random.integers(0, 100, 3))
        features = (1, prefill, decode, 10 * context)
        seconds = float(np.dot(costs_s, features)) + noise_s * random.uniform(-1, 1)
        work = Work(prefill, 4 * context, decode, 6 * context)
        found.append(TimedStep(work, seconds, 0))
    return found


def test_costs_are_found_in_spite_of_whole_milliseconds() -> None:
    costs_s = (0.004, 0.0001, 0.0002, 0.000003)
    worker = fit(steps(costs_s, 0.0005), MODEL, 1_000)
    assert worker.costs_s == pytest.approx(costs_s, rel=0.1)
    work = Work(prefill_tokens=10, decode_tokens=20, decode_context=1_000)
    assert worker.seconds(work) == pytest.approx(0.004 + 0.001 + 0.004 + 0.003, rel=0.05)
    assert worker.recompute_us_per_token() == pytest.approx(100, rel=0.1)


def test_no_cost_is_negative() -> None:
    worker = fit(steps((0.004, 0.0001, -0.00001, 0.000003), 0.0), MODEL, 1_000)
    assert min(worker.costs_s) == 0


def test_steps_after_an_idle_engine_do_not_count() -> None:
    idle = [TimedStep(Work(decode_tokens=1), None, 0)] * 1_000
    with pytest.raises(TooShort, match="99 steps were timed, 100 are needed"):
        fit(idle + steps((1, 1, 1, 1), 0)[:99], MODEL, 1_000)
