"""The worker's loop on a bus: which plans it executes, and what makes a new instance."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpu_worker.lease import Lease
from shared.bus.api import Append
from shared.bus.memory import MemoryBus
from shared.codec import decode_as, encode
from shared.messages.leases import WorkerInfo, WorkerState
from shared.messages.plans import EpochStarted
from tests.gpu_worker.planner import step_plan
from tests.gpu_worker.worker_stage import (
    KEYS,
    KV,
    MODEL,
    SPEEDS,
    Clock,
    Stage,
)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    stage.service.stop()
    await asyncio.wait_for(stage.task, 5)


async def test_a_ready_worker_publishes_its_model(stage: Stage) -> None:
    await stage.instance()
    lease = await stage.lease()
    assert lease is not None
    assert (lease.model, lease.kv, lease.speeds, lease.rank) == (MODEL, KV, SPEEDS, 0)


async def test_plans_of_an_epoch_that_names_the_worker_are_executed_in_order(
    stage: Stage,
) -> None:
    await stage.start_epoch(10, await stage.instance())
    for step in (1, 2, 3):
        await stage.plan(10, step)
    assert await stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_results_trim_the_log_below_the_plans_entry(stage: Stage) -> None:
    await stage.start_epoch(10, await stage.instance())
    await stage.plan(10, 1)
    await stage.results(1)
    await stage.plan(10, 2, outputs_min_id="10-2")
    await stage.until(lambda: stage.executor.steps == [1, 2])
    await stage.quiet()
    assert await stage.results_now() == [(10, 2)]


async def test_an_epoch_without_the_worker_leaves_it_idle(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, "another worker")
    await stage.plan(10, 1)
    await stage.quiet()
    assert stage.executor.steps == []
    await stage.start_epoch(11, mine)
    await stage.plan(11, 1)
    assert await stage.results(1) == [(11, 1)]


async def test_plans_before_any_epoch_are_not_executed(stage: Stage) -> None:
    await stage.instance()
    await stage.plan(9, 1)
    await stage.quiet()
    assert stage.executor.steps == []


async def test_a_new_epoch_starts_with_an_empty_batch(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1)
    await stage.results(1)
    resets = stage.executor.resets
    await stage.start_epoch(11, mine)
    await stage.plan(11, 1)
    assert await stage.results(2) == [(10, 1), (11, 1)]
    assert stage.executor.resets > resets


async def test_a_fenced_worker_forgets_the_epoch_and_waits_to_be_named(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    # A newer epoch stands in outputs already, its entry in plans has not been read yet.
    started = encode(EpochStarted(20, "scheduler", (mine,)))
    await stage.bus.append(Append(KEYS.outputs, [started], 20, 0))
    await stage.plan(10, 1)
    await stage.plan(10, 2)
    await stage.quiet()
    assert await stage.results_now() == []
    assert stage.executor.steps == []
    await stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await stage.plan(20, 1)
    assert await stage.results(1) == [(20, 1)]
    assert await stage.instance() == mine


@pytest.mark.parametrize("fail", ["before", "after"])
async def test_an_append_of_unknown_fate_makes_a_new_instance(stage: Stage, fail: str) -> None:
    mine = await stage.instance()
    life = await stage.life()
    await stage.start_epoch(10, mine)
    plan = encode(step_plan(1))
    await stage.quiet()
    stage.bus.fail = fail
    # Past the flaky append, which is to hit the worker's.
    await MemoryBus.append(stage.bus, Append(KEYS.plans, [plan], 10, 1))
    other = await stage.instance(other_than=mine)
    assert await stage.life() == life, "nothing that it computed is to blame"
    await stage.plan(10, 2)
    await stage.quiet()
    assert await stage.results_now() == ([] if fail == "before" else [(10, 1)])
    await stage.start_epoch(11, other)
    await stage.plan(11, 1)
    await stage.results(1 if fail == "before" else 2)


async def test_a_gap_in_the_steps_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1)
    await stage.plan(10, 3)
    await stage.instance(other_than=mine)
    assert await stage.results_now() == [(10, 1)]


async def test_an_unreadable_plan_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.bus.append(Append(KEYS.plans, [b"nonsense"], 10, 1))
    await stage.instance(other_than=mine)


async def test_a_plan_with_an_unreadable_id_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    await stage.plan(10, 1, outputs_min_id="soon")
    await stage.instance(other_than=mine)
    assert await stage.results_now() == []


async def test_a_plan_that_does_not_fit_makes_a_new_instance(stage: Stage) -> None:
    mine = await stage.instance()
    await stage.start_epoch(10, mine)
    life = await stage.life()
    stage.executor.refuse = True
    await stage.plan(10, 1)
    await stage.instance(other_than=mine)
    assert await stage.life() != life, "what it was to compute may be to blame"


async def test_a_restarted_redis_makes_a_new_instance(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = await stage.instance()
    stage.bus.server = "second"
    monkeypatch.setattr(stage.service._lease, "_due_s", 0.0)
    await stage.start_epoch(10, "another worker")  # wakes the loop
    await stage.instance(other_than=mine)


async def test_the_lease_is_released_at_the_end(stage: Stage) -> None:
    await stage.instance()
    stage.service.stop()
    await stage.start_epoch(10, "another worker")  # wakes the loop
    await asyncio.wait_for(stage.task, 5)
    stage.clock.now_ms += 2
    assert await stage.lease() is None


async def test_a_step_that_fails_ends_the_loop_and_the_lease() -> None:
    stage = Stage()
    await stage.start_epoch(10, await stage.instance())
    stage.executor.error = MemoryError("no room for activations")
    await stage.plan(10, 1)
    with pytest.raises(MemoryError):
        await asyncio.wait_for(stage.task, 5)
    stage.clock.now_ms += 2
    assert await stage.lease() is None


async def test_a_later_worker_takes_over_and_the_earlier_stands_by() -> None:
    stage = Stage()
    mine = await stage.instance()
    later = Lease(stage.bus, KEYS)
    await later.acquire("later", MODEL, KV, SPEEDS)
    stage.service._lease._due_s = 0.0
    await stage.start_epoch(10, "later")
    await stage.quiet()
    stage.clock.now_ms += 4_000
    lease = await stage.lease()
    assert lease is not None
    assert lease.instance == "later"
    stage.clock.now_ms += 2_000  # its lease runs out
    assert await stage.instance() != mine
    stage.service.stop()
    await stage.start_epoch(11, "later")
    await asyncio.wait_for(stage.task, 5)


async def test_a_worker_that_stands_by_survives_an_outage_of_redis(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.service._RETRY_S", 0.001)
    mine = await stage.instance()
    await Lease(stage.bus, KEYS).acquire("later", MODEL, KV, SPEEDS)
    stage.service._lease._due_s = 0.0
    await stage.start_epoch(10, "later")
    await stage.until(lambda: stage.service._lease._ready is None)
    stage.bus.is_down = True
    await stage.until(lambda: stage.bus.num_refused > 2 or stage.task.done())
    assert not stage.task.done()
    stage.bus.is_down = False
    stage.clock.now_ms += 10_000  # the later worker's lease runs out
    assert await stage.instance() not in (mine, "later")


async def test_a_worker_that_ends_leaves_the_lease_of_its_successor_alone(stage: Stage) -> None:
    await stage.instance()
    await Lease(stage.bus, KEYS).acquire("later", MODEL, KV, SPEEDS)
    stage.service.stop()
    await stage.start_epoch(10, "later")  # wakes the loop
    await asyncio.wait_for(stage.task, 5)
    stage.clock.now_ms += 2
    lease = await stage.lease()
    assert lease is not None
    assert lease.instance == "later"


async def test_states_before_ready_leave_a_living_workers_lease_alone() -> None:
    clock = Clock()
    bus = MemoryBus(clock)
    await Lease(bus, KEYS).acquire("first", MODEL, KV, SPEEDS)
    second = Lease(bus, KEYS)
    await second.publish_loading("second")
    assert decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"").instance == "first"
    clock.now_ms += 10_000
    await second.publish_loading("second")
    found = decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"")
    assert (found.state, found.instance) == (WorkerState.LOADING, "second")
    await second.publish_failed("second", "no such model")
    clock.now_ms += 30 * 60 * 1_000
    found = decode_as(WorkerInfo, await bus.get(KEYS.worker(0)) or b"")
    assert (found.state, found.detail) == (WorkerState.FAILED, "no such model")
