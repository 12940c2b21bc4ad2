"""Premapping the next plan while a step computes: what it saves, and that it changes no token."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpu_worker.kv.premap import Premapper
from gpu_worker.kv.virtual_memory import VirtualMemory
from gpu_worker.plan_reader import PlanReader
from gpu_worker.startup.build import Worker
from gpu_worker.step.executor import Executor
from shared.bus.api import Append, EntryId
from shared.bus.keys import EngineKeys
from shared.bus.redis_bus import RedisBus
from shared.codec import Message, encode
from shared.messages.plans import EpochStarted, StepPlan
from tests.gpu_worker.conftest import MakeWorker, poison, prompt
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan

KEYS = EngineKeys("engine-0")
DRAWN = sampling(temperature=1.0, top_k=200, seed=5)


@pytest.fixture(scope="module")
def worker(make_worker: MakeWorker) -> Worker:
    return make_worker("llama", kv_memory="virtual", block_size=8)


@pytest.fixture
def executor(worker: Worker) -> Iterator[Executor]:
    worker.executor.reset()
    poison(worker.executor)
    yield worker.executor
    worker.executor.reset()


class Recording(Planner):
    """A planner that keeps its plans."""

    plans: list[StepPlan]

    def step(self, **chunks: int):  # type: ignore[no-untyped-def]
        execute = self.executor.execute

        def keep(plan: StepPlan):  # type: ignore[no-untyped-def]
            self.plans.append(plan)
            return execute(plan)

        self.executor.execute = keep  # type: ignore[method-assign]
        try:
            return super().step(**chunks)
        finally:
            self.executor.execute = execute  # type: ignore[method-assign]


def history(executor: Executor, seed: int = 0) -> tuple[list[StepPlan], list[list[int]]]:
    """Plans with chunks, forks, a prefix and reused slots; tokens of each step."""
    planner = Recording(executor, seed)
    planner.plans = []
    planner.admit(1, prompt(21), DRAWN)
    planner.fork(1, 2, 1)
    planner.step(s1=21)
    planner.admit(3, prompt(16) + prompt(9, 3), like=1, num_computed=16)
    planner.admit(4, prompt(40, 4))
    planner.step(s3=9, s4=17)
    planner.step(s4=23)
    planner.run(2, 12)
    planner.retire(1)
    planner.step()  # its addresses are read until here
    planner.admit(5, prompt(20, 5), DRAWN)
    planner.step(s5=20)
    planner.run(4, 20)
    executor.reset()
    poison(executor)
    return planner.plans, [result.tokens.tolist() for result in planner.results]


def replay(
    executor: Executor, plans: list[StepPlan], premapped: Callable[[int], StepPlan | None]
) -> tuple[list[list[int]], list[int]]:
    """Tokens of each step, and how many blocks each step mapped itself."""
    memory = executor.memory
    assert isinstance(memory, VirtualMemory)
    mapper, calls, computes = memory._mapper, [0], threading.get_ident()
    real = mapper.map

    def count(place: int, block: int, num: int) -> None:
        calls[0] += threading.get_ident() == computes
        real(place, block, num)

    mapper.map = count  # type: ignore[method-assign]
    tokens, by_step = [], []
    try:
        with futures.ThreadPoolExecutor(1) as thread:
            for plan in plans:
                calls[0] = 0
                following = premapped(plan.step)
                ahead = None if following is None else thread.submit(executor.premap, following)
                tokens.append(executor.execute(plan).tokens.tolist())
                by_step.append(calls[0])
                if ahead is not None:
                    ahead.result()
    finally:
        mapper.map = real  # type: ignore[method-assign]
    return tokens, by_step


def test_a_premapped_plan_has_hardly_anything_left_to_map(executor: Executor) -> None:
    plans, tokens = history(executor)
    history(executor, seed=9)  # so that other blocks are mapped than those of these plans
    same, without = replay(executor, plans, lambda _: None)
    executor.reset()
    history(executor, seed=9)
    found, with_it = replay(
        executor, plans, lambda step: plans[step] if step < len(plans) else None
    )
    assert same == found == tokens
    # A copy on write replaces a block that the step before still uses.
    left = [
        count
        for count, plan in zip(with_it[1:], plans[1:], strict=True)
        if not len(plan.copy_sources)
    ]
    assert sum(left) == 0
    assert sum(without[1:]) > 8


def test_premapping_does_not_change_tokens(executor: Executor) -> None:
    others, _ = history(executor, seed=7)
    plans, tokens = history(executor)
    rng = np.random.default_rng(1)
    nonsense = [
        {"retired": ints(99)},
        {"grown_handles": ints(1, 2, 3), "grown_blocks": ints(0, 0, 63)},
        {
            "grown_handles": ints(*[1] * 99),
            "grown_blocks": ints(*range(33), *range(33), *range(33)),
        },
        {"grown_handles": ints(1), "grown_blocks": ints(10**6)},
        {"replaced_handles": ints(1), "replaced_columns": ints(0), "copy_targets": ints(5)},
    ]

    def premapped(step: int) -> StepPlan:
        if rng.random() < 0.5:
            return step_plan(step + 1, **nonsense[int(rng.integers(len(nonsense)))])
        return others[int(rng.integers(len(others)))]

    found, _ = replay(executor, plans, premapped)
    assert found == tokens


def test_only_the_next_plan_is_premapped(executor: Executor) -> None:
    plans, _ = history(executor)
    demands = []
    executor.memory.premap = demands.append  # type: ignore[method-assign]
    try:
        executor.execute(plans[0])
        executor.premap(plans[0])
        executor.premap(plans[2])
        assert demands == []
        executor.premap(plans[1])
        assert len(demands) == 1
        executor.reset()
        executor.premap(plans[1])
        assert len(demands) == 1
    finally:
        del executor.memory.premap


def test_overlapped_mapping_time_is_distinguished_from_waiting_time(executor: Executor) -> None:
    plans, _ = history(executor)
    executor.execute(plans[0])
    mapping = executor.memory.mapping
    assert mapping is not None
    assert 0 < mapping.map_s <= mapping.wait_s
    executor.premap(plans[1])
    executor.execute(plans[1])
    mapping = executor.memory.mapping
    assert mapping is not None
    assert mapping.wait_s > 0
    executor.execute(plans[2])
    assert executor.memory.mapping.map_s <= executor.memory.mapping.wait_s  # type: ignore[union-attr]


@dataclass
class NotedExecutor:
    """Records the steps that were premapped."""

    premapped: list[int] = field(default_factory=list)

    def premap(self, plan: StepPlan) -> None:
        self.premapped.append(plan.step)


async def test_what_comes_while_a_step_computes_is_handed_over_if_it_is_the_next_plan(
    redis_bus: RedisBus,
) -> None:
    async def append(message: Message, step: int) -> None:
        await redis_bus.append(Append(KEYS.plans, [encode(message)], 1, step))

    executor = NotedExecutor()
    with futures.ThreadPoolExecutor(1) as thread:
        premapper = Premapper(executor, thread)
        plans = PlanReader(redis_bus, KEYS.plans, EntryId(0, 0), 50)
        premapping = asyncio.create_task(premapper.premap_next(plans, 1))
        await append(step_plan(2), 2)
        await premapping
        assert executor.premapped == [2]
        await premapper.premap_next(plans, 1)  # it is still there
        assert executor.premapped == [2, 2]
        await premapper.premap_next(plans, 7)
        entry = await plans.next()
        assert entry is not None
        await append(EpochStarted(2, "s", ()), 3)
        await premapper.premap_next(plans, 2)
        assert executor.premapped == [2, 2]
        await plans.close()
