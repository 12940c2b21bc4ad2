"""The virtual clock: requests arrive, and engines compute one iteration after the other.

The same requests, systems and worker give the same result: there is no other source of time, and no
random number is drawn here. Events at the same time are handled in this order: arrivals, then ends
of iterations by engine.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from benchmarks.simulator.findings.outcome import Outcome, Recorder
from benchmarks.simulator.routers import Router, round_robin
from benchmarks.simulator.system import SimRequest, System
from benchmarks.simulator.worker.worker_model import Worker

_EACH = 4_096  # events between two reports of progress


def run(
    system: System,
    requests: Iterable[SimRequest],
    worker: Worker,
    *,
    until_s: float = float("inf"),
    sample_every_s: float = 1.0,
    on_progress: Callable[[float, int], None] | None = None,
) -> Outcome:
    """Serve requests with one engine; see ``run_many``."""
    return run_many(
        [system],
        requests,
        worker,
        until_s=until_s,
        sample_every_s=sample_every_s,
        on_progress=on_progress,
    )


def run_many(
    systems: Sequence[System],
    requests: Iterable[SimRequest],
    worker: Worker,
    *,
    router: Router | None = None,
    until_s: float = float("inf"),
    sample_every_s: float = 1.0,
    on_progress: Callable[[float, int], None] | None = None,
) -> Outcome:
    """Serve requests until all are complete.

    Args:
        systems: one per engine, all new.
        requests: in the order of their arrival; consumed as time passes.
        worker: of each engine.
        router: chooses an engine for each request; by default one after the other.
        until_s: end before any event after this time; requests may stay incomplete then.
        sample_every_s: interval, in virtual time, of sampling the memory and the queues of all
            engines for ``Outcome.moments``.
        on_progress: called regularly with the virtual time and the number of complete requests.

    Raises:
        ValueError: a request arrives before the one in front of it, or has the id of an incomplete
            one.
    """
    clock = _Clock(systems, worker, router or round_robin(len(systems)), sample_every_s)
    clock.on_progress = on_progress
    arrivals = iter(requests)
    coming = next(arrivals, None)
    while coming is not None:
        now_s = coming.arrival_s
        clock.serve(now_s, until_s)
        if now_s > until_s:
            break
        while coming is not None and coming.arrival_s == now_s:
            clock.submit(coming)
            following = next(arrivals, None)
            if following is not None and not following.arrival_s >= now_s:
                raise ValueError(
                    f"request {following.id} arrives at {following.arrival_s} s, "
                    f"request {coming.id} before it at {now_s} s"
                )
            coming = following
        clock.start_idle()
    clock.serve(float("inf"), until_s)
    return clock.recorder.outcome(min(clock.now_s, until_s))


class _Clock:
    """Engines, the ends of their iterations, and the results of their requests.

    Attributes:
        now_s: time of the last event.
        on_progress: see ``run_many``.
    """

    def __init__(
        self, systems: Sequence[System], worker: Worker, router: Router, sample_every_s: float
    ) -> None:
        self.now_s = 0.0
        self.on_progress: Callable[[float, int], None] | None = None
        self.recorder = Recorder(systems)
        self._systems = systems
        self._parts = worker.parts
        self._router = router
        self._ends: list[tuple[float, int]] = []  # a heap: time and engine
        self._idle: set[int] = set()  # idle engines that got a request since
        self._is_busy = [False] * len(systems)
        self._num_open = array("q", [0]) * len(systems)
        self._sample_every_s = sample_every_s
        self._sample_s = 0.0
        self._num_events = 0

    def submit(self, request: SimRequest) -> None:
        """Submit a request that arrives now."""
        self._pass_time(request.arrival_s)
        engine = self._router(self._num_open)
        system = self._systems[engine]
        try:
            system.submit(request)
        except ValueError:
            self.recorder.refused()
            return
        self.recorder.arrived(request)
        self._num_open[engine] += 1
        if not self._is_busy[engine]:
            self._idle.add(engine)
        else:
            self.recorder.held.changes(engine, self.now_s, system.memory())

    def start_idle(self) -> None:
        """Start idle engines that have work."""
        for engine in sorted(self._idle):
            self._start(engine)
        self._idle.clear()

    def serve(self, before_s: float, until_s: float) -> None:
        """Handle all ends of iterations before one time and not after the other."""
        ends, systems, progressed = self._ends, self._systems, self.recorder.progressed
        while ends:
            end_s, engine = ends[0]
            if end_s >= before_s or end_s > until_s:
                return
            heappop(ends)
            self._pass_time(end_s)
            self._is_busy[engine] = False
            progress = systems[engine].finish(end_s)
            progressed(progress, end_s)
            if progress.finished:
                self._num_open[engine] -= len(progress.finished)
            self._start(engine)

    def _start(self, engine: int) -> None:
        system, now_s, recorder = self._systems[engine], self.now_s, self.recorder
        work = system.start(now_s)
        recorder.held.changes(engine, now_s, system.memory())
        if work is None:
            return
        parts = self._parts(work)
        duration_s = parts.compute_s + parts.memory_s + parts.fixed_s
        recorder.iteration(work, parts, duration_s, system.num_running)
        self._is_busy[engine] = True
        heappush(self._ends, (now_s + duration_s, engine))

    def _pass_time(self, now_s: float) -> None:
        self.now_s = now_s
        while self._sample_s <= now_s:
            self.recorder.sample(self._sample_s)
            self._sample_s += self._sample_every_s
        self._num_events += 1
        if self._num_events % _EACH == 0 and self.on_progress is not None:
            self.on_progress(now_s, self.recorder.num_complete)
