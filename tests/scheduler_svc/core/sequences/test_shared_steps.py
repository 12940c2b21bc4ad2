"""Steps stay short for tenants with few requests, however many another tenant has."""

from collections.abc import Callable
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.codec import encode
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

BLOCK_SIZE, NUM_SLOTS, BUDGET = 4, 32, 256
OVERHEAD_TOKENS = 8.0
SLOWDOWN = 1.5
PROMPT, OUTPUT = 24, 30


class Engine:
    """A scheduler and a worker; records how many tokens each step has."""

    def __init__(self, slowdown: float = SLOWDOWN, num_blocks: int = 1_000) -> None:
        config = SchedulerConfig(
            *(num_blocks, BLOCK_SIZE, 128, NUM_SLOTS, BUDGET, 2, 0, 1_000),
            preemption=Preemption.RECOMPUTE,
            fair_queueing=True,
            max_tenant_slowdown=slowdown,
            step_overhead_tokens=OVERHEAD_TOKENS,
        )
        self.core = Scheduler(config)
        self.worker = FakeWorker(BLOCK_SIZE, BUDGET, lambda handle, position: (7, False))
        self.plans: list[StepPlan] = []
        self.step_tokens: list[int] = []
        self._num_executed = 0
        self._num_entries = 0
        self._numbers: dict[str, int] = {}

    def give(self, *asked: Submit) -> None:
        for one in asked:
            self.core.apply(one, self._next_id())

    def request(self, tenant: str, **changes: int) -> Submit:
        number = self._numbers[tenant] = self._numbers.get(tenant, 0) + 1
        base = 1 + PROMPT * (number + 500 * sum(map(ord, tenant)) % 10_000)
        prompt = range(base, base + PROMPT)
        wanted = {"max_tokens": OUTPUT} | changes
        return submit(f"{tenant}-{number}", prompt, tenant=tenant, **wanted)

    def turn(self) -> bool:
        """Plan all that can be planned and execute one plan; whether there was one."""
        while (plan := self.core.schedule(0)) is not None:
            self.plans.append(plan)
        if self._num_executed == len(self.plans):
            return False
        result = self.worker.execute(self.plans[self._num_executed])
        self._num_executed += 1
        self.step_tokens.append(result.num_batched_tokens)
        self.core.apply(result, self._next_id())
        return True

    def num_open(self, tenant: str) -> int:
        return sum(group.submit.tenant == tenant for group in self.core._known.by_request.values())

    def run(self, num_turns: int, streams: dict[str, int]) -> None:
        """Let tenants have so many requests at any time."""
        for _ in range(num_turns):
            for tenant, count in streams.items():
                for _ in range(count - self.num_open(tenant)):
                    self.give(self.request(tenant))
            assert self.turn()

    def finish(self) -> None:
        while self.turn():
            pass
        assert not self.core._known.by_request

    def _next_id(self) -> EntryId:
        self._num_entries += 1
        return EntryId(1, self._num_entries)


def mean_cost(engine: Engine, begin: int) -> float:
    """The mean of what the steps cost from one on, in tokens."""
    return OVERHEAD_TOKENS + mean(engine.step_tokens[begin:])


def running(engine: Engine, tenant: str) -> int:
    return engine.core._planner.queues.tenants.num_sequences(tenant)


@given(
    flood=st.integers(2, 60),
    few=st.integers(1, 3),
    num_tenants=st.integers(2, 4),
    num_blocks=st.sampled_from([200, 1_000]),
)
@settings(max_examples=15, deadline=None)
def test_a_flood_slows_steps_down_by_a_bounded_factor(
    flood: int, few: int, num_tenants: int, num_blocks: int
) -> None:
    others = {f"t{number}": few for number in range(num_tenants - 1)}
    equal = Engine(num_blocks=num_blocks)
    equal.run(250, {"flood": few} | others)
    engine = Engine(num_blocks=num_blocks)
    engine.run(250, {"flood": flood} | others)
    # Blocks may not be found again, so preempted groups recompute some tokens.
    bound = 1.1 * SLOWDOWN * mean_cost(equal, 60)
    assert mean_cost(engine, 60) <= bound, (mean_cost(engine, 60), mean_cost(equal, 60))
    engine.finish()


def test_without_a_limit_a_flood_makes_steps_longer_than_that() -> None:
    costs = []
    for slowdown, flood in ((SLOWDOWN, 1), (0.0, 30)):
        engine = Engine(slowdown)
        engine.run(200, {"flood": flood, "single": 1})
        costs.append(mean_cost(engine, 60))
    assert costs[1] > 2 * costs[0]


def test_one_tenant_alone_has_the_plans_that_it_would_have_without_the_limit() -> None:
    plans = []
    for slowdown in (0.0, 1.0):
        engine = Engine(slowdown)
        engine.run(150, {"only": 40})
        plans.append([encode(plan) for plan in engine.plans])
    assert plans[0] == plans[1]


def test_tenants_with_as_many_requests_as_each_other_fill_the_slots() -> None:
    engine = Engine()
    engine.run(80, {"first": 40, "second": 40})
    assert running(engine, "first") + running(engine, "second") == NUM_SLOTS


def settled(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        assert engine.turn()
    raise AssertionError("not within 200 steps")


def test_what_was_preempted_comes_back_when_the_other_tenant_is_gone() -> None:
    engine = Engine()
    engine.give(*(engine.request("flood", max_tokens=100) for _ in range(NUM_SLOTS)))
    settled(engine, lambda: running(engine, "flood") == NUM_SLOTS)
    engine.give(engine.request("single", max_tokens=4))
    settled(engine, lambda: running(engine, "single") == 1)
    assert running(engine, "flood") <= OVERHEAD_TOKENS
    settled(engine, lambda: running(engine, "single") == 0)
    settled(engine, lambda: running(engine, "flood") == NUM_SLOTS)
    engine.finish()


def test_a_tenant_runs_its_share_at_once_though_preempted_groups_of_another_wait() -> None:
    engine = Engine()
    engine.give(*(engine.request("flood", max_tokens=100) for _ in range(NUM_SLOTS)))
    settled(engine, lambda: running(engine, "flood") == NUM_SLOTS)
    engine.give(*(engine.request("few", max_tokens=20) for _ in range(4)))
    settled(engine, lambda: running(engine, "few") == 4)
    assert engine.core._planner.queues.preempted
    engine.finish()


def test_a_request_of_more_choices_than_the_limit_runs_while_tenants_share() -> None:
    engine = Engine()
    engine.give(engine.request("single", max_tokens=100))
    engine.give(engine.request("wide", num_choices=NUM_SLOTS - 1, max_tokens=4))
    settled(engine, lambda: running(engine, "wide") == NUM_SLOTS - 1)
    engine.finish()


def test_more_urgent_requests_do_not_give_way() -> None:
    engine = Engine()
    engine.give(engine.request("single", max_tokens=100))
    flood = [engine.request("flood", max_tokens=50, priority=-1) for _ in range(NUM_SLOTS - 1)]
    engine.give(*flood)
    settled(engine, lambda: running(engine, "flood") == NUM_SLOTS - 1)
    engine.finish()
