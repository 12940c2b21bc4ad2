"""The worker's loop beside a compute thread, or a device whose steps overlap."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from gpu_worker.batch.plan_checks import PlanRefused
from shared.bus.api import Append
from shared.bus.memory import MemoryBus
from shared.codec import encode
from shared.messages.plans import EpochStarted
from tests.gpu_worker.planner import step_plan
from tests.gpu_worker.worker_stage import (
    KEYS,
    Device,
    HeldExecutor,
    Stage,
)


@dataclass
class HeldStage:
    """A worker whose second step lasts, with plans up to the third."""

    stage: Stage
    executor: HeldExecutor
    instance: str

    async def hold(self) -> None:
        """Run until the second step computes."""
        for step in (1, 2, 3):
            await self.stage.plan(10, step)
        await self.stage.until(self.executor.began.is_set)


@pytest.fixture
async def held() -> AsyncIterator[HeldStage]:
    executor = HeldExecutor(held_step=2)
    with ThreadPoolExecutor(1) as thread:
        stage = Stage(executor, thread)
        instance = await stage.instance()
        await stage.start_epoch(10, instance)
        yield HeldStage(stage, executor, instance)
        executor.release.set()
        stage.service.stop()
        await asyncio.wait_for(stage.task, 5)


async def test_a_result_is_appended_while_the_next_step_computes(held: HeldStage) -> None:
    await held.hold()
    assert await held.stage.results(1) == [(10, 1)]
    held.executor.release.set()
    assert await held.stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_a_worker_that_is_fenced_off_in_a_step_forgets_it_when_it_is_over(
    held: HeldStage,
) -> None:
    started = encode(EpochStarted(20, "scheduler", (held.instance,)))
    await held.stage.bus.append(Append(KEYS.outputs, [started], 20, 0))
    await held.hold()
    held.executor.release.set()
    await held.stage.quiet()
    assert await held.stage.results_now() == []
    assert held.executor.steps == []
    assert held.executor.resets_while_held == 0
    await held.stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await held.stage.plan(20, 1)
    assert await held.stage.results(1) == [(20, 1)]


async def test_an_append_that_fails_in_a_step_makes_a_new_instance_when_it_is_over(
    held: HeldStage,
) -> None:
    held.stage.bus.fail = "before"  # the result of the first step
    for step in (1, 2, 3):
        data = encode(step_plan(step))
        await MemoryBus.append(held.stage.bus, Append(KEYS.plans, [data], 10, step))
    await held.stage.until(held.executor.began.is_set)
    await held.stage.quiet()
    lease = await held.stage.lease()
    assert lease is not None
    assert lease.instance == held.instance  # the step is not over
    held.executor.release.set()
    await held.stage.instance(other_than=held.instance)
    assert await held.stage.results_now() == []
    assert held.executor.resets_while_held == 0


async def test_the_loop_measures_how_long_an_available_plan_waited(held: HeldStage) -> None:
    await held.hold()
    held.executor.release.set()
    await held.stage.results(3)
    first, *others = held.stage.observer.seen
    assert first is None  # nothing was computed before
    assert all(overhead is not None and overhead >= 0 for overhead in others)


async def test_the_next_step_begins_without_the_loop(held: HeldStage) -> None:
    await held.hold()
    await held.stage.quiet()  # the third plan is there, too
    held.executor.release.set()
    deadline = time.monotonic() + 5
    while held.executor.steps != [1, 2, 3] and time.monotonic() < deadline:
        pass  # nothing is awaited: the loop does nothing
    assert held.executor.steps == [1, 2, 3]
    assert await held.stage.results(3) == [(10, 1), (10, 2), (10, 3)]


@pytest.mark.parametrize("why", ["refused", "failed"])
async def test_steps_after_a_failed_step_are_not_executed(held: HeldStage, why: str) -> None:
    await held.hold()
    await held.stage.quiet()  # the third plan is there, too
    held.executor.fail_once = PlanRefused("unknown") if why == "refused" else OSError("broken")
    held.executor.release.set()
    if why == "refused":
        instance = await held.stage.instance(other_than=held.instance)
        await held.stage.start_epoch(20, instance)
        await held.stage.plan(20, 1)
        assert await held.stage.results(2) == [(10, 1), (20, 1)]
        assert held.executor.steps == [1]
    else:
        with pytest.raises(OSError, match="broken"):
            await held.stage.task
        assert await held.stage.results_now() == [(10, 1)]
        assert held.executor.steps == [1]
        held.stage.task = asyncio.create_task(asyncio.sleep(0))


@dataclass
class DeviceStage:
    """A worker whose steps overlap."""

    stage: Stage
    device: Device
    instance: str

    async def begun(self, num: int) -> None:
        await self.stage.until(lambda: len(self.device.begun) == num)


@pytest.fixture
async def overlapping() -> AsyncIterator[DeviceStage]:
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as waiting:
        device = Device(waiting)
        stage = Stage(device, thread, device)
        instance = await stage.instance()
        await stage.start_epoch(10, instance)
        yield DeviceStage(stage, device, instance)
        stage.service.stop()
        while not stage.task.done():
            for step in device.begun:
                step.done.set()
            await asyncio.sleep(0.001)
        stage.task.result()


async def test_a_step_begins_while_the_device_is_busy_with_the_one_before(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    for step in (1, 2, 3):
        await stage.plan(10, step)
    await overlapping.begun(2)
    await stage.quiet()
    assert len(device.begun) == 2, "two at most"
    assert await stage.results_now() == []
    device.end(1)
    assert await stage.results(1) == [(10, 1)]
    await overlapping.begun(3)
    device.end(2)
    device.end(3)
    assert await stage.results(3) == [(10, 1), (10, 2), (10, 3)]


async def test_a_plan_that_comes_while_the_device_is_busy_is_begun_at_once(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    await stage.plan(10, 1)
    await overlapping.begun(1)
    await stage.quiet()
    await stage.plan(10, 2)
    await overlapping.begun(2)
    device.end(1)
    device.end(2)
    assert await stage.results(2) == [(10, 1), (10, 2)]
    assert stage.observer.seen == [None, 0.0]  # the device had nothing to wait for


async def test_without_a_next_plan_a_result_is_appended_when_the_device_is_done(
    overlapping: DeviceStage,
) -> None:
    await overlapping.stage.plan(10, 1)
    await overlapping.begun(1)
    overlapping.device.end(1)
    assert await overlapping.stage.results(1) == [(10, 1)]


async def test_the_batch_is_kept_until_the_device_is_done(overlapping: DeviceStage) -> None:
    stage, device = overlapping.stage, overlapping.device
    started = encode(EpochStarted(20, "scheduler", (overlapping.instance,)))
    await stage.plan(10, 1)
    await stage.plan(10, 2)
    await overlapping.begun(2)
    await stage.bus.append(Append(KEYS.outputs, [started], 20, 0))  # fences it off
    first, second = device.begun
    first.done.set()
    await stage.until(lambda: device.steps == [1])
    await stage.quiet()
    assert len(device.begun) == 2
    second.done.set()
    await stage.until(lambda: not device.begun)
    assert device.unfinished_at_reset == []
    assert await stage.results_now() == []
    await stage.bus.append(Append(KEYS.plans, [started], 20, 0))
    await stage.plan(20, 1)
    await overlapping.begun(1)
    device.end(1)
    assert await stage.results(1) == [(20, 1)]


async def test_a_refused_plan_ends_the_instance_after_the_step_before_is_appended(
    overlapping: DeviceStage,
) -> None:
    stage, device = overlapping.stage, overlapping.device
    await stage.plan(10, 1)
    await overlapping.begun(1)
    device.refuse_to_begin = True
    await stage.plan(10, 2)
    device.end(1)
    assert await stage.results(1) == [(10, 1)]
    await stage.instance(other_than=overlapping.instance)
    assert device.unfinished_at_reset == []
