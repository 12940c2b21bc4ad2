"""In any order of events every request ends, and no block is lost or shared by mistake."""

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core import events
from scheduler_svc.core.config import Preemption, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.messages.leases import PrefixState
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import StepPlan
from shared.messages.requests import Abort, Stop
from shared.sampling import BeamParams, EarlyStopping
from tests.support.fake_beams import searched
from tests.support.fake_worker import FakeWorker
from tests.support.requests import pin, submit


@dataclass
class Client:
    """What a client asked for, and what it received."""

    num_prompt: int
    max_tokens: int
    rank: tuple[int, int]
    outputs: list[list[int]]
    running: set[int]
    hypotheses: list[tuple[tuple[int, ...], float]] | None = None  # that a beam search must find

    @property
    def ended(self) -> bool:
        return not self.running


def drawn(handle: int, position: int) -> tuple[int, bool]:
    """A token that depends on handle and position only; one in 29 ends the sequence."""
    token = (handle * 7919 + position * 104_729) % 997
    return token, token % 29 == 0


class EngineMachine(RuleBasedStateMachine):
    """A scheduler, a worker that lags behind it, and clients that come and go."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_sequences=st.integers(1, 6),
        extra_budget=st.integers(0, 8),
        plans_in_flight=st.integers(1, 3),
        prefix_caching=st.booleans(),
        num_host_blocks=st.integers(0, 12),
        preemption=st.sampled_from(list(Preemption)),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        extra_budget: int,
        plans_in_flight: int,
        prefix_caching: bool,
        num_host_blocks: int,
        preemption: Preemption,
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=80,
            max_num_sequences=max_sequences,
            max_num_batched_tokens=max_sequences + extra_budget,
            max_plans_in_flight=plans_in_flight,
            num_watermark_blocks=num_blocks // 10,
            outputs_retention=100,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
            preemption=preemption,
            max_pinned_blocks=num_blocks // 2,
        )
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(block_size, self.config.max_num_batched_tokens, drawn)
        self.plans: deque[StepPlan] = deque()
        self.clients: dict[str, Client] = {}
        self.handles: dict[int, tuple[str, int]] = {}
        self.num_entries = 0
        self.started: set[str] = set()

    @rule(
        num_prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 30),
        num_choices=st.integers(1, 4),
        priority=st.integers(0, 1),
        family=st.integers(0, 2),
        early_stopping=st.none() | st.sampled_from(list(EarlyStopping)),
    )
    def arrive(
        self,
        num_prompt: int,
        max_tokens: int,
        num_choices: int,
        priority: int,
        family: int,
        early_stopping: EarlyStopping | None,
    ) -> None:
        request_id = f"r{len(self.clients)}"
        num_choices = min(num_choices, self.config.max_num_sequences)
        prompt = range(family, family + num_prompt)
        beams = early_stopping and BeamParams(num_choices, family - 0.5, early_stopping)
        asked = submit(
            request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            num_choices=num_choices,
            priority=priority,
            beams=beams,
        )
        [answer] = self.core.apply(asked, self._next_id())
        shared = (num_prompt - 1) // self.config.block_size
        each = self.config.blocks_for(num_prompt + max_tokens - 1)
        needed = shared + num_choices * (each - shared)
        if needed > self.config.num_blocks:
            assert isinstance(answer, RequestEnded)
            assert str(needed) in answer.error
            assert str(self.config.num_blocks) in answer.error
            return
        assert isinstance(answer, RequestState)
        rank = (priority, len(self.clients))
        outputs: list[list[int]] = [[] for _ in range(num_choices)]
        running = set(range(num_choices))
        found = searched(tuple(prompt), max_tokens, beams) if beams else None
        self.clients[request_id] = Client(num_prompt, max_tokens, rank, outputs, running, found)
        for choice in answer.choices:
            assert choice.handle not in self.handles, "handles are never reused"
            self.handles[choice.handle] = (request_id, choice.choice)

    @rule(num_tokens=st.integers(1, 40), family=st.integers(0, 2))
    def pin(self, num_tokens: int, family: int) -> None:
        prefix = range(family, family + num_tokens)
        assert self.core.apply(pin(f"{family}-{num_tokens}", prefix), self._next_id()) == []

    @precondition(lambda self: any(not c.ended for c in self.clients.values()))
    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data: st.DataObject, stop: bool) -> None:
        alive = [name for name, client in self.clients.items() if not client.ended]
        name = data.draw(st.sampled_from(alive))
        client = self.clients[name]
        if not stop:
            [answer] = self.core.apply(Abort(name, "attachment", "gone"), self._next_id())
            assert isinstance(answer, RequestEnded)
            client.running.clear()
            return
        found = [choice for choice in client.running if client.outputs[choice]]
        if found:
            choice = data.draw(st.sampled_from(found))
            [answer] = self.core.apply(Stop(name, choice, 1), self._next_id())
            client.running.remove(choice)
            assert isinstance(answer, RequestEnded if client.ended else ChoiceEnded)

    @rule()
    def plan(self) -> None:
        plan = self.core.schedule(0)
        if plan is not None:
            self.plans.append(plan)
        assert len(self.plans) <= self.config.max_plans_in_flight

    @precondition(lambda self: self.plans)
    @rule()
    def execute(self) -> None:
        result = self.worker.execute(self.plans.popleft())
        for answer in self.core.apply(result, self._next_id()):
            assert isinstance(answer, BeamsEnded)
            client = self.clients[answer.request_id]
            assert client.running
            client.running.clear()
            found = [(tuple(got.tokens.tolist()), got.score) for got in answer.hypotheses]
            assert found == client.hypotheses
        self._deliver(result)

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.pool.num_used + self.core.pool.num_free == self.config.num_blocks
        stats = self.core.stats()
        assert stats.num_kv_tokens <= stats.num_used_blocks * self.config.block_size
        alive = sum(not client.ended for client in self.clients.values())
        pending = sum(found.state == PrefixState.PENDING for found in self.core.prefixes())
        assert stats.num_running + stats.num_waiting == alive + pending
        assert stats.num_pinned_blocks <= self.config.max_pinned_blocks
        assert stats.num_shared_blocks >= 0
        self._check_events()

    def teardown(self) -> None:
        """No request starves: without new arrivals all end, and all blocks are free."""
        if not hasattr(self, "core"):
            return
        for _ in range(20_000):
            self.plan()
            if not self.plans:
                break
            self.execute()
        assert all(client.ended for client in self.clients.values())
        stats = self.core.stats()
        states = {found.state for found in self.core.prefixes()}
        assert PrefixState.PENDING not in states
        assert (stats.num_pinned_blocks > 0) == (PrefixState.PINNED in states)
        assert self.core.pool.num_used == stats.num_pinned_blocks
        assert stats.num_used_blocks == 0
        assert (stats.num_running, stats.num_waiting, stats.num_kv_tokens) == (0, 0, 0)
        assert stats.num_cached_blocks == 0 or self.config.prefix_caching
        assert self.core.host_pool.num_used == 0

    def _deliver(self, result: StepResult) -> None:
        ended = set(result.ended_rows.tolist())
        rows = zip(result.handles.tolist(), result.tokens.tolist(), strict=True)
        for row, (handle, token) in enumerate(rows):
            if handle not in self.handles:
                continue  # it computes a prefix
            name, choice = self.handles[handle]
            client = self.clients[name]
            if choice not in client.running:
                continue
            output = client.outputs[choice]
            position = client.num_prompt + len(output)
            assert token == drawn(handle, position)[0], "a position is sampled once, in order"
            output.append(token)
            assert len(output) <= client.max_tokens
            if row in ended:
                client.running.remove(choice)

    def _check_events(self) -> None:
        """FCFS within a priority: no request starts before an earlier one that waits."""
        for event in self.core.take_events():
            if isinstance(event, events.Admitted) and not event.again:
                self.started.add(event.request_id)
                mine = self.clients[event.request_id].rank
                for name, client in self.clients.items():
                    earlier = client.rank[1] < mine[1] and client.rank[0] <= mine[0]
                    assert not earlier or client.ended or name in self.started

    def _next_id(self) -> EntryId:
        self.num_entries += 1
        return EntryId(1, self.num_entries)


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=80, deadline=None)
TestEngine = EngineMachine.TestCase


def test_a_long_random_run_ends_clean() -> None:
    """Many steps of one engine: calendars and arrays stay right over time."""
    rng = np.random.default_rng(7)
    config = SchedulerConfig(60, 4, 128, 16, 48, 2, 1, 1_000, num_host_blocks=20)
    core = Scheduler(config)
    worker = FakeWorker(config.block_size, config.max_num_batched_tokens, drawn)
    plans: deque[StepPlan] = deque()
    entries = 0
    for arrival in range(400):
        entries += 1
        first = arrival % 3 * 100 if arrival % 2 else arrival * 100
        prompt = range(first, first + int(rng.integers(1, 60)))
        asked = submit(
            f"r{arrival}",
            prompt=prompt,
            max_tokens=int(rng.integers(1, 60)),
            num_choices=int(rng.integers(1, 3)),
        )
        core.apply(asked, EntryId(1, entries))
        if rng.random() < 0.1:
            victim = f"r{int(rng.integers(0, arrival + 1))}"
            core.apply(Abort(victim, "attachment", "gone"), EntryId(1, entries))
        for _ in range(int(rng.integers(0, 4))):
            while (plan := core.schedule(0)) is not None:
                plans.append(plan)
            if plans:
                entries += 1
                core.apply(worker.execute(plans.popleft()), EntryId(1, entries))
    while (plan := core.schedule(0)) is not None or plans:
        if plan is not None:
            plans.append(plan)
            continue
        core.apply(worker.execute(plans.popleft()), EntryId(1, entries))
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    preempted = [event for event in core.take_events() if isinstance(event, events.Preempted)]
    kinds = {event.kind for event in preempted}
    assert kinds == {"recompute", "swap"}, "the pool was meant to be too small"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_equal_requests_share_and_preempt_each_other_for_ever_so_long(seed: int) -> None:
    """Everything that can be shared is, in a pool that is far too small, at any timing."""
    rng = random.Random(seed)
    host = rng.choice([0, 10, 40])
    core = Scheduler(SchedulerConfig(32, 4, 256, 256, 512, 2, 0, 100, num_host_blocks=host))
    worker = FakeWorker(4, 512, lambda handle, position: (position * 3 + 1, False))
    coming = [submit(f"r{number}", range(3), max_tokens=90) for number in range(12)]
    plans: deque[StepPlan] = deque()
    results: deque[StepResult] = deque()
    entries = 0
    while coming or plans or results or core.stats().num_running:
        if coming and rng.random() < 0.5:
            entries += 1
            core.apply(coming.pop(), EntryId(1, entries))
        while (plan := core.schedule(0)) is not None:
            plans.append(plan)
        if plans and rng.random() < 0.7:
            results.append(worker.execute(plans.popleft()))
        if results and rng.random() < 0.7:
            entries += 1
            core.apply(results.popleft(), EntryId(1, entries))
    assert core.pool.num_used == 0


def test_a_swap_out_is_sent_even_if_no_sequence_is_left_to_compute() -> None:
    config = SchedulerConfig(4, 1, 64, 4, 8, 3, 0, 100, num_host_blocks=4, preemption="swap")
    core = Scheduler(config)
    worker = FakeWorker(1, 8, lambda handle, position: (position, False))
    core.apply(submit("short", [1, 2], max_tokens=1), EntryId(1, 1))
    core.apply(submit("long", [3], max_tokens=4), EntryId(1, 2))
    # The short one's blocks are not known to be free yet when the long one needs a fifth.
    plans = [core.schedule(0) for _ in range(3)]
    assert plans[2] is not None
    assert len(plans[2].swap_out_device) == 2
    entries = 2
    while plans:
        if (plan := plans.pop(0)) is not None:
            entries += 1
            core.apply(worker.execute(plan), EntryId(1, entries))
            plans.append(core.schedule(0))
    assert [
        event.num_generated for event in core.take_events() if isinstance(event, events.Ended)
    ] == [
        1,
        4,
    ]
    assert core.pool.num_used == core.host_pool.num_used == 0
