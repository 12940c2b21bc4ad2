"""Whether an engine whose worker has failed is still starting, or has failed for good."""

import dataclasses
from collections.abc import Callable

from scheduler_svc.worker_watch import WorkerLook
from shared.messages.leases import EngineState


class WorkerFailure:
    """The time since workers cannot start.

    Args:
        patience_s: how long they may try before the engine has failed.
        clock_s: monotonic time.
    """

    def __init__(self, patience_s: float, clock_s: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock_s = clock_s
        self._since_s: float | None = None
        self._why = ""

    def judge(self, found: WorkerLook) -> WorkerLook:
        """The same snapshot with the engine's state, which depends on earlier failures too."""
        if found.state is EngineState.READY:
            self._since_s = None
            return found
        if found.state is EngineState.FAILED:
            self._why = found.detail
            if self._since_s is None:
                self._since_s = self._clock_s()
        if self._since_s is None:
            return found
        if self._clock_s() - self._since_s < self._patience_s:
            detail = f"the worker cannot start: {self._why}"
            return dataclasses.replace(found, state=EngineState.STARTING, detail=detail)
        return dataclasses.replace(found, state=EngineState.FAILED, detail=self._why)
