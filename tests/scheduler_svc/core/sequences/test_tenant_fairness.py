"""Service is divided between tenants, however much each of them asks for."""

from collections import Counter, deque
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core import events
from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.messages.outputs import RequestEnded
from shared.messages.plans import StepPlan
from shared.messages.requests import Submit
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

BLOCK_SIZE = 4
NUM_SLOTS = 8
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0
LONGEST_PROMPT, LONGEST_OUTPUT = 20, 12


class Engine:
    """A scheduler and a worker; counts what the plans and results serve to each tenant."""

    def __init__(self, num_blocks: int = 400, max_tenant_sequences: int = 0) -> None:
        config = SchedulerConfig(
            *(num_blocks, BLOCK_SIZE, 128, NUM_SLOTS, 64, 2, 0, 1_000),
            preemption=Preemption.RECOMPUTE,
            prefix_caching=False,
            fair_queueing=True,
            prompt_token_weight=PROMPT_WEIGHT,
            generated_token_weight=GENERATED_WEIGHT,
            max_tenant_sequences=max_tenant_sequences,
        )
        self.core = Scheduler(config)
        self.worker = FakeWorker(BLOCK_SIZE, 64, lambda handle, position: (position % 97, False))
        self.served: Counter[str] = Counter()  # weighted tokens
        self.admitted: list[str] = []
        self.preempted: list[events.Preempted] = []
        self.first_tokens: set[str] = set()
        self.ended: set[str] = set()
        self.tenants: dict[str, str] = {}
        self._generated: Counter[str] = Counter()  # tokens at the last admission
        self._plans: deque[StepPlan] = deque()
        self._num_entries = 0

    def give(self, *asked: Submit) -> list[object]:
        answers: list[object] = []
        for one in asked:
            self.tenants[one.request_id] = one.tenant
            answers += self.core.apply(one, self._next_id())
        return answers

    def turn(self) -> bool:
        """Plan all that can be planned and execute one plan; whether there was one."""
        while (plan := self.core.schedule(0)) is not None:
            self._plans.append(plan)
        self._take_events()
        if not self._plans:
            return False
        self.core.apply(self.worker.execute(self._plans.popleft()), self._next_id())
        self._take_events()
        return True

    def has_waiting(self, tenant: str) -> bool:
        mine = {name for name, found in self.tenants.items() if found == tenant}
        return bool(mine - set(self.admitted) - self.ended)

    def _take_events(self) -> None:
        for event in self.core.take_events():
            match event:
                case events.Admitted():
                    if not event.again:
                        self.admitted.append(event.request_id)
                        tenant = self.tenants[event.request_id]
                        self.served[tenant] += PROMPT_WEIGHT * event.num_tokens
                case events.Preempted():
                    self.preempted.append(event)
                case events.FirstToken():
                    self.first_tokens.add(event.request_id)
                case events.Ended():
                    self.ended.add(event.request_id)
                    tenant = self.tenants[event.request_id]
                    self.served[tenant] += GENERATED_WEIGHT * event.num_generated

    def _next_id(self) -> EntryId:
        self._num_entries += 1
        return EntryId(1, self._num_entries)


def of(tenant: str, numbers: Iterable[int], prompt: int = 4, **changes: int) -> list[Submit]:
    """Requests of a tenant with different prompts of so many tokens."""
    base = 1_000 * (1 + len(tenant))
    return [
        submit(f"{tenant}-{n}", range(base + 50 * n, base + 50 * n + prompt), 0, 1, 0, "", tenant)
        if not changes
        else submit(
            f"{tenant}-{n}", range(base + 50 * n, base + 50 * n + prompt), tenant=tenant, **changes
        )
        for n in numbers
    ]


def test_a_tenant_with_one_request_starts_at_once_beside_a_flood() -> None:
    engine = Engine()
    engine.give(*of("flood", range(64), max_tokens=100))
    for _ in range(5):
        assert engine.turn()
    assert len(engine.admitted) == NUM_SLOTS
    engine.give(*of("one", [0], max_tokens=20))
    num_turns = 0
    while "one-0" not in engine.first_tokens:
        assert engine.turn()
        num_turns += 1
    # Plans in flight, one plan for the preemption, and one for the prompt.
    assert num_turns <= 6
    [displaced] = engine.preempted
    assert (engine.tenants[displaced.request_id], displaced.by) == ("flood", "one-0")
    while "one-0" not in engine.ended:
        assert engine.turn()
    assert engine.preempted == [displaced], "what was displaced does not come back at its expense"


def test_a_tenant_that_runs_already_displaces_nothing() -> None:
    engine = Engine()
    engine.give(*of("one", [0], max_tokens=100))
    engine.turn()
    engine.give(*of("flood", range(20), max_tokens=100))
    engine.turn()
    engine.give(*of("one", range(1, 4), max_tokens=100))
    for _ in range(20):
        engine.turn()
    assert engine.preempted == []


def test_the_only_group_of_a_tenant_is_not_displaced() -> None:
    engine = Engine()
    for number in range(NUM_SLOTS):
        engine.give(*of(f"tenant{number}", [0], max_tokens=60))
    for _ in range(4):
        engine.turn()
    engine.give(*of("late", [0], max_tokens=60))
    for _ in range(10):
        engine.turn()
    assert engine.preempted == []


def test_a_wide_request_displaces_no_more_than_an_equal_share() -> None:
    engine = Engine()
    engine.give(*of("flood", range(20), max_tokens=100))
    engine.turn()
    engine.give(*of("fits", [0], num_choices=NUM_SLOTS // 2, max_tokens=10))
    for _ in range(20):
        engine.turn()
    assert {event.by for event in engine.preempted} == {"fits-0"}
    assert len(engine.preempted) == NUM_SLOTS // 2
    engine.give(*of("wide", [0], num_choices=NUM_SLOTS // 2 + 1, max_tokens=10))
    for _ in range(20):
        engine.turn()
    assert {event.by for event in engine.preempted} == {"fits-0"}


def test_when_memory_runs_out_the_tenant_with_several_groups_gives_way() -> None:
    engine = Engine(num_blocks=24)
    engine.give(*of("flood", range(6), prompt=8, max_tokens=40))
    for _ in range(3):
        engine.turn()
    engine.give(*of("one", [0], prompt=8, max_tokens=24))
    while engine.turn():
        pass
    assert engine.preempted
    assert {engine.tenants[event.request_id] for event in engine.preempted} == {"flood"}
    assert engine.ended == set(engine.tenants)


def test_a_pause_saves_up_no_service() -> None:
    engine = Engine()
    engine.give(*of("pauses", [0], max_tokens=2))
    while engine.turn():
        pass
    engine.give(*of("busy", range(40), max_tokens=30))
    for _ in range(100):
        engine.turn()
    engine.give(*of("pauses", range(1, 41), max_tokens=30))
    before = len(engine.admitted)
    while len(engine.admitted) < before + 16:
        assert engine.turn()
    after = Counter(engine.tenants[name] for name in engine.admitted[before:])
    # It begins at the other's counter: from there on, both get as much.
    assert after["busy"] >= 5


def test_a_tenant_runs_at_most_as_many_sequences_as_it_may() -> None:
    engine = Engine(max_tenant_sequences=3)
    engine.give(*of("first", range(10), max_tokens=20))
    engine.give(*of("second", range(2), max_tokens=20))
    engine.turn()
    counts = Counter(group.submit.tenant for group in engine.core.running)
    assert counts == {"first": 3, "second": 2}
    [refused] = engine.give(*of("third", [0], num_choices=4))
    assert isinstance(refused, RequestEnded)
    assert "4 choices were asked for, at most 3 sequences of one key" in refused.error
    while engine.turn():
        pass
    assert len(engine.ended) == 12


def test_urgent_requests_go_before_fairness() -> None:
    engine = Engine()
    engine.give(*of("other", range(8), max_tokens=10))
    engine.give(*of("urgent", range(8), priority=-1, max_tokens=10))
    engine.turn()
    assert {engine.tenants[name] for name in engine.admitted} == {"urgent"}


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT)),
        min_size=2,
        max_size=4,
    ),
    num_blocks=st.sampled_from([40, 400]),
)
@settings(max_examples=40, deadline=None)
def test_service_of_tenants_that_always_wait_differs_by_a_bound(
    sizes: list[tuple[int, int]], num_blocks: int
) -> None:
    """Theorem 4.4 of the paper, for tenants with requests of any size."""
    engine = Engine(num_blocks)
    names = [f"t{'x' * number}" for number in range(len(sizes))]
    for name, (prompt, max_tokens) in zip(names, sizes, strict=True):
        engine.give(*of(name, range(60), prompt=prompt, max_tokens=max_tokens))
    # What a tenant may have running is served to it after its counter was the lowest.
    of_one_request = PROMPT_WEIGHT * LONGEST_PROMPT + GENERATED_WEIGHT * LONGEST_OUTPUT
    bound = 2 * NUM_SLOTS * of_one_request
    while engine.turn() and all(map(engine.has_waiting, names)):
        served = [engine.served[name] for name in names]
        assert max(served) - min(served) <= bound
    assert len(engine.admitted) >= 60
