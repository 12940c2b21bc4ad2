"""Ranks that execute plans together notice when they do not do the same."""

import threading
import time
from dataclasses import replace

import pytest

from gpu_worker.ranks import ranked_executor
from gpu_worker.ranks.member import GroupOver
from gpu_worker.ranks.ranked_executor import RankedExecutor
from gpu_worker.ranks.step_watch import StepWatch
from shared.messages.outputs import StepResult
from shared.messages.plans import StepPlan
from tests.gpu_worker.planner import ints, step_plan
from tests.gpu_worker.ranks.rank_threads import RankThreads
from tests.gpu_worker.worker_stage import FakeExecutor


class _Sampling(FakeExecutor):
    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def execute(self, plan: StepPlan) -> StepResult:
        return replace(super().execute(plan), tokens=ints(self.token))


def errors(plans: list[list[StepPlan]], tokens: list[int]) -> list[str]:
    """What each rank reports, which executes plans of its own and samples one token."""
    pair = RankThreads(2)
    ranks = pair.connect()

    def executed(rank: int) -> str:
        executor = RankedExecutor(_Sampling(tokens[rank]), ranks[rank].collectives)
        try:
            for plan in plans[rank]:
                executor.execute(plan)
        except GroupOver as error:
            ranks[rank].collectives.close()
            return str(error)
        return ""

    found = pair.run(executed)
    pair.close()
    return found


def test_equal_steps_and_tokens_pass() -> None:
    plans = [step_plan(1), step_plan(2), step_plan(3)]
    assert errors([plans, plans], [7, 7]) == ["", ""]


@pytest.mark.parametrize(
    ("other", "tokens", "reason"),
    [
        ([step_plan(1), step_plan(3)], [7, 7], "rank 1 is at step 3, rank 0 at step 2"),
        (
            [step_plan(1), step_plan(2, now_ms=5)],
            [7, 7],
            "rank 1 and rank 0 are at step 2 of different epochs",
        ),
        (
            [step_plan(1), step_plan(2)],
            [7, 8],
            "rank 1 has sampled other tokens than rank 0 before step 2: it computes otherwise",
        ),
    ],
)
def test_a_difference_names_the_rank_on_both(
    other: list[StepPlan], tokens: list[int], reason: str
) -> None:
    assert errors([[step_plan(1), step_plan(2)], other], tokens) == [reason, reason]


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_is_gone_ends_the_others_exchange_at_once(shared: bool) -> None:
    pair = RankThreads(2)
    ranks = pair.connect(shared=shared)
    ranks[1].collectives.close()
    began_s = time.monotonic()
    with pytest.raises(GroupOver, match=r"rank 0 of group .*: an? \w+ failed"):
        ranks[0].minimum(1)
    assert time.monotonic() - began_s < 60, "not only when the deadline is over"
    pair.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_is_late_ends_the_others_exchange(shared: bool) -> None:
    pair = RankThreads(2)
    ranks = pair.connect(shared=shared)
    ranks[0].collectives.set_deadline(0.1)
    with pytest.raises(GroupOver, match=r"an? \w+ failed: .*[Tt]imed out"):
        ranks[0].minimum(1)
    pair.close()


class _Hanging(FakeExecutor):
    """A step that ends only when the communicator is aborted, as on a GPU."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.aborted = threading.Event()
        self._fails = fails

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step > 1:
            self.aborted.wait()
            if self._fails:
                raise RuntimeError("CUDA error: the communicator was aborted")
        return super().execute(plan)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_hangs_is_given_up_at_the_deadline(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_executor, "_LEAST_DEADLINE_S", 0.05)
    pair = RankThreads(1)
    (ranks,) = pair.connect()
    hanging = _Hanging(fails)
    executor = RankedExecutor(
        hanging, ranks.collectives, ranks.failure, StepWatch(hanging.aborted.set)
    )
    executor.execute(step_plan(1))
    with pytest.raises(GroupOver, match="a step took more than"):
        executor.execute(step_plan(2))
    pair.close()


def test_steps_in_time_and_errors_of_their_own_are_not_given_up() -> None:
    given_up = threading.Event()
    watch = StepWatch(given_up.set)
    for _ in range(100):
        with watch.at_most(60.0):
            pass
    with pytest.raises(RuntimeError, match="its own"), watch.at_most(60.0):
        raise RuntimeError("its own")
    with pytest.raises(GroupOver, match="a sum"), watch.at_most(60.0):
        raise GroupOver("a sum failed")
    assert not given_up.is_set()
