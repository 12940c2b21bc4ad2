"""What if: the requests of a stretch once more, by the scheduler core on a virtual clock. Pure.

The core is the real one; the worker only counts tokens. Its steps take as long as those of the
logs did by a line fitted to their tokens.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Preempted
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step.plan_draft import PlanDraft
from scheduler_svc.past.workload import PastRequest, Workload
from shared.bus.api import EntryId
from shared.messages.endings import EndFlag
from shared.messages.outputs import RequestState

_MOST_STEPS = 30_000
_MOST_POINTS = 400


@dataclass(slots=True)
class _Resident:
    """A sequence of the worker.

    Attributes:
        num_left: tokens to compute before it samples.
    """

    num_left: int
    decodes: bool = False


class CountingWorker:
    """Executes plans without a model."""

    def __init__(self) -> None:
        self.targets: dict[int, int] = {}  # tokens that sequences still generate, by handle
        self._residents: dict[int, _Resident] = {}

    def execute(self, plan: PlanDraft) -> tuple[list[int], list[int], int]:
        """Sequences that sample, those whose token is their last, and the number of tokens."""
        residents = self._residents
        for handle in plan.retired:
            residents.pop(handle, None)
        for found in plan.admissions:
            residents[found.handle] = _Resident(found.num_tokens - found.num_computed)
        chunks = dict(zip(plan.chunk_handles, plan.chunk_tokens, strict=True))
        sampled = [
            handle
            for handle, resident in residents.items()
            if handle not in chunks and resident.decodes
        ]
        num_tokens = len(sampled) + sum(plan.chunk_tokens)
        for handle, length in chunks.items():
            if (resident := residents.get(handle)) is not None:
                resident.num_left -= length
                if resident.num_left <= 0:
                    resident.decodes = True
                    sampled.append(handle)
        for parent, child in zip(plan.fork_parents, plan.fork_children, strict=True):
            if parent in residents:
                residents[child] = _Resident(0, decodes=True)
                sampled.append(child)
        ended = []
        for handle in sampled:
            self.targets[handle] = left = self.targets.get(handle, 1) - 1
            if left <= 0:
                ended.append(handle)
                residents.pop(handle, None)
        return sampled, ended, num_tokens


class Rerun:
    """One run of a workload.

    Args:
        start_ms: of the clock.
    """

    def __init__(self, config: SchedulerConfig, workload: Workload, start_ms: int) -> None:
        self._config = config
        self._workload = workload
        self._core = Scheduler(config)
        self._worker = CountingWorker()
        self._arrivals = deque(workload.requests)
        self._in_flight: deque[PlanDraft] = deque()
        self._now_us = 1_000.0 * start_ms
        self._points: list[list[int]] = []  # [ms, used, waiting, running, preemptions, tokens]
        self._num_preemptions = 0
        self._num_tokens = 0
        self._num_refused = 0

    def run(self, until_ms: int) -> dict[str, Any]:
        """Run until all requests have ended, or for so long.

        Returns:
            ``points`` of the curves, and sums.
        """
        for _ in range(_MOST_STEPS):
            if self._now_us / 1e3 > until_ms:
                break
            self._arrive()
            self._plan()
            if not self._in_flight:
                if not self._arrivals:
                    break
                self._now_us = max(self._now_us, 1e3 * self._arrivals[0].at_ms)
                continue
            self._step(self._in_flight.popleft())
        every = max(1, len(self._points) // _MOST_POINTS)
        return {
            "points": self._points[::every],
            "num_preemptions": self._num_preemptions,
            "num_tokens": self._num_tokens,
            "num_refused": self._num_refused,
            "num_left": self._core.num_requests + len(self._arrivals),
            "end_ms": int(self._now_us / 1e3),
        }

    def _arrive(self) -> None:
        now_ms = int(self._now_us / 1e3)
        while self._arrivals and self._arrivals[0].at_ms <= now_ms:
            request = self._arrivals.popleft()
            answers = self._core.apply(request.submit, EntryId(max(1, now_ms), 0))
            states = [found for found in answers if isinstance(found, RequestState)]
            self._num_refused += not states
            for state in states:
                self._expect(request, state)

    def _expect(self, request: PastRequest, state: RequestState) -> None:
        for choice in state.choices:
            self._worker.targets[choice.handle] = request.target(choice.choice)

    def _plan(self) -> None:
        while (plan := self._core.draft(int(self._now_us / 1e3))) is not None:
            self._in_flight.append(plan)

    def _step(self, plan: PlanDraft) -> None:
        sampled, ended, num_tokens = self._worker.execute(plan)
        base_us, token_us = self._workload.step_us
        num_copies = len(plan.swap_out_host) + len(plan.swap_in_host)
        self._now_us += base_us + token_us * num_tokens
        self._now_us += num_copies * self._config.swap_us_per_block
        self._num_tokens += len(sampled)
        self._core.apply_result(
            plan.step,
            np.array(sampled, np.int32),
            np.full(len(sampled), 1, np.int32),
            [(handle, EndFlag.STOP) for handle in ended],
            (),
        )
        self._core.take_answers()
        self._num_preemptions += sum(
            isinstance(event, Preempted) for event in self._core.take_events()
        )
        stats = self._core.stats()
        self._points.append(
            [
                *(int(self._now_us / 1e3), stats.num_used_blocks, stats.num_waiting),
                *(stats.num_running, self._num_preemptions, self._num_tokens),
            ]
        )


def what_if(
    settings: dict[str, Any], changes: dict[str, Any], workload: Workload, span_ms: tuple[int, int]
) -> dict[str, Any]:
    """The run of a workload with the settings that there were, and with others.

    Args:
        settings: of the scheduler core.
        changes: of them.
        span_ms: of the stretch, by the engine's clock.

    Raises:
        ValueError: the settings are impossible.
    """
    known = {name: value for name, value in settings.items() if name in _FIELDS}
    # Requests are not refused for what waits: they were accepted.
    known |= {"max_waiting_requests": 0, "max_waiting_tokens": 0, "queue_ttl_ms": 0}
    known |= {"max_tenant_requests": 0, "max_tenant_tokens": 0, "vocab_size": 0}
    before = SchedulerConfig(**known)
    after = replace(before, **changes)
    start_ms, end_ms = span_ms
    until_ms = end_ms + 2 * (end_ms - start_ms)
    return {
        "before": Rerun(before, workload, start_ms).run(until_ms),
        "after": Rerun(after, workload, start_ms).run(until_ms),
        "num_requests": len(workload.requests),
        "num_preemptions": workload.num_preemptions,
        "num_blocks": after.num_blocks,
    }


_FIELDS = set(SchedulerConfig.__dataclass_fields__)
