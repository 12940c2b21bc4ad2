"""A worker on the CPU whose steps overlap, like those of a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpu_worker.step.begun_step import BegunStep
from gpu_worker.step.executor import Executor
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan

# Without a next plan a step lasts this long.
_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class BusyStep:
    """A step that lasts until the next one has begun, if that comes in time."""

    begun: BegunStep
    followed: threading.Event

    def wait(self) -> None:
        self.followed.wait(_STEP_S)


class BusyDevice:
    """Overlapping steps of an executor.

    Attributes:
        num_overlapping: steps that began before the one before was finished.
    """

    def __init__(self, executor: Executor) -> None:
        self.num_overlapping = 0
        self.computing = ThreadPoolExecutor(1)
        self.waiting = ThreadPoolExecutor(1)
        self._executor = executor
        self._last: BusyStep | None = None

    def begin(self, plan: StepPlan) -> BusyStep:
        step = BusyStep(self._executor.begin(plan), threading.Event())
        if self._last is not None:
            self.num_overlapping += 1
            self._last.followed.set()
        self._last = step
        return step

    def finish(self, step: BusyStep) -> StepResult:
        if self._last is step:
            self._last = None
        return self._executor.finish(step.begun)

    def close(self) -> None:
        """Shut down; there must be no further step."""
        self.computing.shutdown()
        self.waiting.shutdown()
