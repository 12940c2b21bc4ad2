"""Executes plans as one rank of several: the same steps on all, with the same tokens.

Before a step the ranks exchange which plan they execute, and a checksum of the tokens that they
have sampled. So a rank that computes another step, or that has gone astray, is found before its
tensors are added to those of the others.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from gpu_worker.ranks.collectives import Collectives
from gpu_worker.ranks.member import GroupOver
from gpu_worker.ranks.step_watch import StepWatch
from gpu_worker.step.plan_executor import PlanExecutor
from gpu_worker.step.recent_maximum import RecentMaximum
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan

# A collective may take a few of the longest steps: the other ranks may begin later.
_LEAST_DEADLINE_S = 5.0
_MANY = 4.0
_MOST_DEADLINE_S = 60.0
_WINDOW_S = 120.0


class RankedExecutor:
    """Executes plans together with the other ranks.

    Args:
        executor: of this rank's part of the model.
        collectives: of the group.
        failure: of a sum inside of a forward pass that cannot raise; None: there was none.
        watch: ends steps that exceed the deadline; None: sums have deadlines of their own.
        clock_s: monotonic time.
    """

    def __init__(
        self,
        executor: PlanExecutor,
        collectives: Collectives,
        failure: Callable[[], GroupOver | None] = lambda: None,
        watch: StepWatch | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._collectives = collectives
        self._failure = failure
        self._watch = watch
        self._clock_s = clock_s
        self._longest_s = RecentMaximum(_WINDOW_S, clock_s)
        self._checksum = 0  # of all tokens of this epoch

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises:
            GroupOver: the ranks are not at the same step, or one is gone or late.
            PlanRefused: it does not fit the sequences in the batch.
        """
        wanted_s = _LEAST_DEADLINE_S + _MANY * self._longest_s.value
        deadline_s = min(wanted_s, _MOST_DEADLINE_S)
        self._collectives.set_deadline(deadline_s)
        self._compare(plan)
        began_s = self._clock_s()
        with nullcontext() if self._watch is None else self._watch.at_most(deadline_s):
            result = self._executor.execute(plan)
        if (failure := self._failure()) is not None:
            raise failure
        self._longest_s.add(self._clock_s() - began_s)
        self._checksum = zlib.crc32(result.tokens.tobytes(), self._checksum)
        return result

    def reset(self) -> None:
        """Drop all sequences."""
        self._checksum = 0
        self._executor.reset()

    def _compare(self, plan: StepPlan) -> None:
        cursors = zlib.crc32(f"{plan.requests_cursor} {plan.outputs_cursor}".encode())
        own = [plan.step, plan.now_ms, cursors, self._checksum]
        reason = difference(self._collectives.gather(own))
        if reason is not None:
            raise GroupOver(reason)


def difference(numbers: Sequence[Sequence[int]]) -> str | None:
    """Why ranks must not compute together: the first that differs from rank 0; None: none does.

    Args:
        numbers: of each rank: step, time and cursors of its plan, checksum of its tokens.
    """
    first = numbers[0]
    for rank, other in enumerate(numbers[1:], 1):
        if other[0] != first[0]:
            return f"rank {rank} is at step {other[0]}, rank 0 at step {first[0]}"
        if other[1:3] != first[1:3]:
            return f"rank {rank} and rank 0 are at step {first[0]} of different epochs"
        if other[3] != first[3]:
            before = f"before step {first[0]}"
            return (
                f"rank {rank} has sampled other tokens than rank 0 {before}: it computes otherwise"
            )
    return None
