"""Times calls on a GPU from captured graphs, over buffers that rotate past the L2 cache."""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.kernels.report import Timing

Call = Callable[[], object]


class Clock:
    """Measures median times.

    Args:
        device: where the calls run; on a CPU wall time is measured.
        repeats: measurements of each call.
        budget_ms: approximate longest time of a series of measurements.
    """

    def __init__(self, device: torch.device, repeats: int = 21, budget_ms: float = 1500) -> None:
        self._device = device
        self._repeats = repeats
        self._budget_ms = budget_ms

    def time(self, calls: Sequence[Call], from_host: bool = False) -> Timing:
        """Microseconds of one call; ``calls`` do the same on memory of their own.

        Calls are captured in one graph, so that neither Python nor launches are timed, unless the
        host's part belongs to the result (``from_host``).
        """
        if self._device.type != "cuda":
            return self.wall_clock(calls)
        for call in calls:  # compiles kernels
            call()
        torch.cuda.synchronize()
        run = _together(calls) if from_host else _captured(calls)
        first_ms = self._event_ms(run, 1)
        rounds = max(1, min(20, int(self._budget_ms / (self._repeats * max(first_ms, 0.01)))))
        samples = [self._event_ms(run, rounds) / rounds for _ in range(self._repeats)]
        return Timing.of([1e3 * sample / len(calls) for sample in samples])

    def _event_ms(self, run: Call, rounds: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(rounds):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def wall_clock(self, calls: Sequence[Call]) -> Timing:
        """Microseconds of calls that do host work, each timed once."""
        samples = []
        for call in calls:
            begin = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - begin))
        return Timing.of(samples)


def _together(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Call]) -> Call:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # lazy allocations must happen before the capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
