"""The fit finds the costs that durations were made from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.fitted_model import TimedStep, TooShort, fit, timed_steps
from benchmarks.simulator.worker.model_shapes import find_model
from gpu_worker.startup.warm_up_plans import decode_plan
from scheduler_svc.recording import FileRecorder
from shared.bus.api import Entry, EntryId
from shared.codec import encode
from shared.messages.outputs import StepResult
from shared.messages.plans import Tick
from tests.support.walks.recorded import CONFIG

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


def result_of(step: int) -> bytes:
    none = np.empty(0, np.int32)
    return encode(
        StepResult(step, none, none, none, none, (), (), (), none, none, 0, 0, 0),
    )


def test_an_arrival_while_all_plans_are_in_flight_does_not_make_the_engine_idle(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recording"
    recorder = FileRecorder(path)
    assert CONFIG.max_plans_in_flight == 2
    recorder.epoch(EntryId(5, 0), CONFIG, EntryId(0, 0), ())

    def plan(step: int, now_ms: int, *turns: Tick) -> None:
        made = replace(decode_plan(step), now_ms=now_ms, idle_turns=turns)
        recorder.plan(EntryId(5, step), encode(made))

    def result(step: int) -> None:
        recorder.entry("outputs", Entry(EntryId(5, step), (result_of(step),)))

    plan(1, 0)
    plan(2, 0)
    result(1)
    plan(3, 4, Tick(2, "1-1", "5-0"))  # a request came while steps 1 and 2 were in flight
    result(2)
    plan(4, 9)
    result(3)
    result(4)
    plan(5, 20, Tick(13, "1-1", "5-3"))  # no request was left when the result of step 3 came
    plan(6, 20)
    result(5)
    plan(7, 26)
    recorder.close()
    assert [step.duration_s for step in timed_steps(path)] == [0.004, 0.005, None, None, 0.006]
