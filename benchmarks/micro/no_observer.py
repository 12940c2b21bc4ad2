"""An observer of a worker's steps that records nothing."""

from shared.messages.outputs import StepResult


class NoObserver:
    """Records nothing, so that metrics cost a measurement no time."""

    def snapshot(self) -> None:
        """Nothing."""

    def step(self, result: StepResult, snapshot: object, overhead_s: float | None) -> None:
        """Nothing."""
