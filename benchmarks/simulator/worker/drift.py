"""A machine whose speed changes while it serves, taken from a recording."""

from collections.abc import Sequence

import numpy as np

from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.fitted_model import FittedWorker, TimedStep
from benchmarks.simulator.worker.worker_model import Parts

_WINDOW_S = 1.0


def slowdowns(steps: Sequence[TimedStep], worker: FittedWorker) -> list[float]:
    """The duration of each second's steps, relative to the fit.

    A second without timed steps takes the value of the one before.
    """
    began_ms = steps[0].begin_ms
    num_windows = int((steps[-1].begin_ms - began_ms) / 1_000 / _WINDOW_S) + 1
    real_s, fitted_s = np.zeros(num_windows), np.zeros(num_windows)
    for step in steps:
        if step.duration_s is not None:
            window = int((step.begin_ms - began_ms) / 1_000 / _WINDOW_S)
            real_s[window] += step.duration_s
            fitted_s[window] += worker.seconds(step.work)
    found: list[float] = []
    for real, fitted in zip(real_s, fitted_s, strict=True):
        found.append(real / fitted if fitted else (found[-1] if found else 1.0))
    return found


class DriftingWorker(FittedWorker):
    """Multiplies the durations of another worker model, second by second.

    Attributes:
        now_s: on the virtual clock.

    Args:
        worker: the other model.
        slowdowns: factor of each second; the last one is kept.
        began_s: when the first of these seconds begins.
    """

    def __init__(self, worker: FittedWorker, slowdowns: Sequence[float], began_s: float) -> None:
        super().__init__(worker.model, worker.costs_s, worker.kv_slots)
        self.now_s = 0.0
        self._slowdowns = slowdowns
        self._began_s = began_s

    def parts(self, work: Work) -> Parts:
        """The parts of the time at the present speed."""
        window = int((self.now_s - self._began_s) / _WINDOW_S)
        slowdown = self._slowdowns[max(0, min(window, len(self._slowdowns) - 1))]
        return Parts(compute_s=slowdown * self.seconds(work))


class DriftingEngine(PageStream):
    """Our scheduler with a worker that gets the time."""

    def __init__(self, worker: DriftingWorker, config: PageStreamConfig) -> None:
        super().__init__(worker, config)
        self._drifting = worker

    def start(self, now_s: float) -> Work | None:
        """Start the next iteration at the present speed."""
        self._drifting.now_s = now_s
        return super().start(now_s)
