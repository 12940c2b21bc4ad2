"""The loop of a worker that is one rank of several, on a bus of which the test writes the rest."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gpu_worker.lease import Lease
from gpu_worker.ranks.member import GroupOver, Member
from shared.bus.api import Append
from shared.codec import encode
from shared.messages.plans import EpochStarted
from tests.gpu_worker.worker_stage import KEYS, FakeExecutor, Stage

_RENEWAL_MS = 2_000


@asynccontextmanager
async def staged(rank: int, executor: FakeExecutor | None = None) -> AsyncIterator[Stage]:
    stage = Stage(executor, member=Member(rank, 2, "group", parent=f"parent {rank}"))
    try:
        yield stage
    finally:
        stage.service.stop()
        await asyncio.wait([stage.task])


async def ended_with(stage: Stage, reason: str) -> None:
    with pytest.raises(GroupOver, match=reason):
        await asyncio.wait_for(stage.task, 5)


async def test_a_lease_names_rank_and_group() -> None:
    async with staged(1) as stage:
        await stage.instance()
        lease = await stage.lease()
        assert lease is not None
        assert (lease.rank, lease.num_ranks, lease.group) == (1, 2, "group")


async def test_another_rank_than_0_executes_plans_and_appends_nothing() -> None:
    async with staged(1) as stage:
        await stage.start_epoch(10, "rank 0", await stage.instance())
        await stage.plan(10, 1)
        await stage.plan(10, 2)
        await stage.until(lambda: stage.executor.steps == [1, 2])
        await stage.quiet()
        assert await stage.results_now() == []


async def test_rank_0_executes_what_is_in_front_of_an_epoch_that_has_fenced_it_off() -> None:
    """The others read no outputs: they execute it, too."""
    async with staged(0) as stage:
        mine = await stage.instance()
        await stage.start_epoch(10, mine, "rank 1")
        started = encode(EpochStarted(20, "scheduler", (mine, "rank 1")))
        await stage.bus.append(Append(KEYS.outputs, [started], 20, 0))
        await stage.plan(10, 1)
        await stage.plan(10, 2)
        await stage.until(lambda: stage.executor.steps == [1, 2])
        await stage.bus.append(Append(KEYS.plans, [started], 20, 0))
        await stage.plan(20, 1)
        assert await stage.results(1) == [(20, 1)]


async def refuse(stage: Stage) -> None:
    stage.executor.refuse = True


async def fail(stage: Stage) -> None:
    stage.executor.error = GroupOver("rank 0 did not come in time")


@pytest.mark.parametrize(
    ("prepare", "reason"), [(refuse, "sequence 9 is unknown"), (fail, "did not come in time")]
)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_plan_that_one_rank_cannot_execute_ends_its_process(
    rank: int, prepare: Callable[[Stage], object], reason: str
) -> None:
    async with staged(rank) as stage:
        await stage.start_epoch(10, await stage.instance())
        await prepare(stage)  # type: ignore[misc]
        await stage.plan(10, 1)
        await ended_with(stage, reason)
        lease = await stage.bus.get(KEYS.worker(rank))
        stage.clock.now_ms += 10
        assert await stage.bus.get(KEYS.worker(rank)) is None, f"released: {lease!r}"


async def test_a_rank_ends_when_another_one_has_left_the_group() -> None:
    async with staged(0) as stage:
        await stage.instance()
        await Lease(stage.bus, KEYS, Member(1, 2)).publish_loading("again")
        await ended_with(stage, "rank 1 has left group group")


async def test_a_rank_ends_when_another_process_is_this_rank() -> None:
    async with staged(1) as stage:
        await stage.instance()
        other = Lease(stage.bus, KEYS, Member(1, 2, "group"))
        await other.acquire("other", *_described(stage))
        await ended_with(stage, "another worker has taken the engine over")


def _described(stage: Stage):  # type: ignore[no-untyped-def]
    from tests.gpu_worker.worker_stage import KV, MODEL, SPEEDS

    return MODEL, KV, SPEEDS
