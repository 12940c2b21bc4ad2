"""Times one scheduling step: ``schedule`` and ``apply`` of the core, without Redis.

    python -m benchmarks.micro.scheduler_step [--json]

Every sequence decodes (block size 16, prompts of 128 tokens); ``churn`` adds four arrivals and four
endings per step, ``churn_100k_waiting`` the same with 100,000 requests in the waiting queue.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from benchmarks.micro.plain_result import plain_result
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from shared.sampling import SamplingParams

_SIZES = (64, 256, 1024, 4096)
_PROMPT = 128
_CONTEXT = 2_048
_CHURN = 4  # arrivals, and endings, per step
_NONE = np.empty(0, np.int32)
_SAMPLING = SamplingParams.greedy(_CONTEXT - _PROMPT)


class _Rows:
    """The worker's side: the sequences that get a token in a step."""

    def __init__(self) -> None:
        self._prompt_left: dict[int, int] = {}
        self._handles: IntArray = np.empty(0, np.int32)

    @property
    def num_decoding(self) -> int:
        return len(self._handles)

    def run(self, plan: StepPlan, num_ending: int) -> StepResult:
        """Execute a plan; the oldest ``num_ending`` sequences end."""
        if len(plan.retired):
            self._handles = self._handles[~np.isin(self._handles, plan.retired)]
        for admission in plan.admissions:
            self._prompt_left[admission.handle] = len(admission.tokens)
        started = []
        for handle, count in zip(plan.chunk_handles, plan.chunk_tokens, strict=True):
            self._prompt_left[handle] -= count
            if self._prompt_left[handle] == 0:
                del self._prompt_left[handle]
                started.append(handle)
        if started:
            self._handles = np.concatenate([self._handles, np.array(started, np.int32)])
        ended = np.arange(min(num_ending, self.num_decoding), dtype=np.int32)
        result = plain_result(plan.step, self._handles, 7, ended, EndFlag.STOP)
        self._handles = self._handles[len(ended) :]
        return result


class _Engine:
    """A core with ``size`` decoding sequences, and stand-ins for the worker and the clients."""

    def __init__(self, size: int, num_waiting: int) -> None:
        blocks = (size + 64) * _CONTEXT // 16
        self.core = Scheduler(
            SchedulerConfig(blocks, 16, _CONTEXT, size, size + 4 * _PROMPT, 2, 0, 10_000)
        )
        self.rows = _Rows()
        self._ids = self._entry_ids()
        self._num_submitted = 0
        self._plans: deque[StepPlan] = deque()
        self.submit(size + num_waiting)
        while self.rows.num_decoding < size:
            self.step(0)
        for _ in range(20):
            self.step(0)

    def submit(self, count: int) -> None:
        """Submit new requests."""
        for _ in range(count):
            self._num_submitted += 1
            self.core.apply(self._new_request(self._num_submitted), next(self._ids))

    def _new_request(self, number: int) -> Submit:
        prompt = np.arange(number, number + _PROMPT, dtype=np.int32)  # nothing to share
        return Submit(
            request_id=f"r{number}",
            gateway="g",
            attachment="a",
            prompt=prompt,
            sampling=_SAMPLING,
            received_ms=0,
            num_choices=1,
            priority=0,
            cache_salt="",
        )

    def step(self, num_churn: int) -> float:
        """Run one step with as many arrivals and endings; seconds in the core."""
        began = time.perf_counter()
        self.submit(num_churn)
        while (plan := self.core.schedule(0)) is not None:
            self._plans.append(plan)
        spent = time.perf_counter() - began
        result = self.rows.run(self._plans.popleft(), num_churn)
        began = time.perf_counter()
        self.core.apply(result, next(self._ids))
        spent += time.perf_counter() - began
        self.core.take_events()
        return spent

    def _entry_ids(self) -> Iterator[EntryId]:
        seq = 0
        while True:
            seq += 1
            yield EntryId(1, seq)


def measure(size: int, num_waiting: int, num_churn: int, steps: int) -> float:
    """Median milliseconds of a step."""
    engine = _Engine(size, num_waiting)
    return 1_000 * statistics.median(engine.step(num_churn) for _ in range(steps))


def main() -> None:
    """Measure all cases and print one table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=400, help="steps per case")
    args = parser.parse_args()
    cases = {
        "steady_ms": (0, 0),
        "churn_ms": (0, _CHURN),
        "churn_100k_waiting_ms": (100_000, _CHURN),
    }
    found = {
        name: {str(size): round(measure(size, *case, args.steps), 4) for size in _SIZES}
        for name, case in cases.items()
    }
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'ms per step':<24}" + "".join(f"{size:>10}" for size in _SIZES))
    for name, row in found.items():
        print(f"{name:<24}" + "".join(f"{value:>10.4f}" for value in row.values()))


if __name__ == "__main__":
    main()
