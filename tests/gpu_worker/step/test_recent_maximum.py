"""The recent maximum of step times, by which a lease outlives its steps."""

from typing import Any, cast

import pytest

from gpu_worker.step.recent_maximum import RecentMaximum
from gpu_worker.step.step_queue import StepQueue
from tests.scheduler_svc.test_recovery import result


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_value_is_remembered_for_a_window_at_least_and_for_two_at_most() -> None:
    for began_s in (0.0, 0.5, 0.9):
        clock = Clock()
        found = RecentMaximum(1.0, clock)
        clock.now_s += began_s
        found.add(7.0)
        found.add(3.0)
        clock.now_s += 0.99
        assert found.value == 7.0
        clock.now_s += 1.02
        assert found.value == 0.0


def test_smaller_values_take_the_place_of_a_larger_one() -> None:
    clock = Clock()
    found = RecentMaximum(1.0, clock)
    found.add(60.0)
    values = []
    for _ in range(30):
        clock.now_s += 0.1
        found.add(0.2)
        values.append(found.value)
    assert values[0] == 60.0
    assert values[-1] == 0.2


class _Executor:
    """An executor with steps of given durations."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.takes_s = 0.0

    def execute(self, _plan: Any) -> Any:
        self.clock.now_s += self.takes_s
        return result(1, {})


class _Observer:
    def snapshot(self) -> None:
        return None

    def step(self, *_: Any) -> None:
        return None


async def test_one_slow_step_does_not_lengthen_the_lease_for_ever() -> None:
    clock = Clock()
    executor = _Executor(clock)
    steps = StepQueue(
        cast(Any, executor), cast(Any, _Observer()), clock, thread=None, pipeline=None, waiting=None
    )
    executor.takes_s = 90.0
    await steps.begin(cast(Any, None))
    assert steps.longest_s == pytest.approx(90.0)
    executor.takes_s = 0.1
    for _ in range(10 * 300):  # five minutes
        await steps.begin(cast(Any, None))
    assert steps.longest_s == pytest.approx(0.1)
