"""Interfaces of the executor and of the observer, as the worker's loop uses them."""

from typing import Protocol, TypeVar

from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan


class PlanExecutor(Protocol):
    """Carries out plans."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises:
            PlanRefused: it does not fit the sequences in the batch.
        """

    def reset(self) -> None:
        """Drop all sequences."""


class UnfinishedStep(Protocol):
    """A step that a device computes."""

    def wait(self) -> None:
        """Wait until the device has finished it; callable from any thread."""


_Step = TypeVar("_Step", bound=UnfinishedStep)
_Snapshot = TypeVar("_Snapshot")


class Pipeline(Protocol[_Step]):
    """Overlaps steps: one may begin before the one before has ended; at most two are under way."""

    def begin(self, plan: StepPlan) -> _Step:
        """Queue a step on the device.

        Raises:
            PlanRefused: the plan does not fit the sequences in the batch.
        """

    def finish(self, step: _Step) -> StepResult:
        """The result of the earliest step; to be called on the thread that begins steps."""


class StepObserver(Protocol[_Snapshot]):
    """Records every step that was computed."""

    def snapshot(self) -> _Snapshot:
        """The executor's state now; called after a step and before the next."""

    def step(self, result: StepResult, snapshot: _Snapshot, overhead_s: float | None) -> None:
        """Record a step.

        Args:
            result: of the step.
            snapshot: taken after the step.
            overhead_s: seconds between the step before and this one; None if the worker waited
                for the plan meanwhile.
        """
