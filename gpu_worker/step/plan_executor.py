"""What the worker's loop asks of those that compute, and of those that watch."""

from typing import Protocol, TypeVar

from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan


class PlanExecutor(Protocol):
    """What carries out plans; the loop knows no more of it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises:
            PlanRefused: it does not fit what went before.
        """

    def reset(self) -> None:
        """Forget all sequences."""


class UnfinishedStep(Protocol):
    """A step that a device is busy with."""

    def wait(self) -> None:
        """Until the device is done with it; from any thread."""


_Step = TypeVar("_Step", bound=UnfinishedStep)
_Look = TypeVar("_Look")


class Pipeline(Protocol[_Step]):
    """Begins a step before the one before has ended; two at most are under way."""

    def begin(self, plan: StepPlan) -> _Step:
        """Let the device begin.

        Raises:
            PlanRefused: the plan does not fit what went before.
        """

    def finish(self, step: _Step) -> StepResult:
        """The result of the earliest one, on the thread on which steps begin."""


class StepObserver(Protocol[_Look]):
    """Hears of every step that was computed."""

    def look(self) -> _Look:
        """What is to be seen when a step was computed and the next is not begun."""

    def step(self, result: StepResult, look: _Look, overhead_s: float | None) -> None:
        """Take note of a step.

        Args:
            look: what was seen then.
            overhead_s: between the step before and this one, whose plan was there already; None
                if the worker waited for it.
        """
