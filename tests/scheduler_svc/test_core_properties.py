"""Whatever arrives in whatever order: every request ends, and no block is lost or shared."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core import notes
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages import Abort, RequestEnded, StepPlan, StepResult, Stop
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit

_LETTERS = st.integers(0, 10)


@dataclass
class Client:
    """What a client was promised, and what it saw."""

    num_prompt: int
    max_tokens: int
    output: list[int]
    ended: bool = False


def drawn(handle: int, position: int) -> tuple[int, bool]:
    """A token that depends on nothing but who and where; one in 16 ends the sequence."""
    token = (handle * 7919 + position * 104_729) % 1_000
    return token, token % 16 == 0


class EngineMachine(RuleBasedStateMachine):
    """A scheduler, a worker that lags behind it, and clients that come and go."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_sequences=st.integers(1, 6),
        extra_budget=st.integers(0, 8),
        plans_in_flight=st.integers(1, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        extra_budget: int,
        plans_in_flight: int,
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
        )
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(block_size, self.config.max_num_batched_tokens, drawn)
        self.plans: deque[StepPlan] = deque()
        self.clients: dict[str, Client] = {}
        self.handles: dict[int, str] = {}
        self.num_entries = 0
        self.admitted: list[str] = []

    @rule(num_prompt=st.integers(1, 40), max_tokens=st.integers(1, 30))
    def arrive(self, num_prompt: int, max_tokens: int) -> None:
        request_id = f"r{len(self.clients)}"
        asked = submit(request_id, prompt=range(num_prompt), max_tokens=max_tokens)
        [answer] = self.core.apply(asked, self._next_id())
        needed = self.config.blocks_for(num_prompt + max_tokens - 1)
        if needed > self.config.num_blocks:
            assert isinstance(answer, RequestEnded)
            assert str(needed) in answer.error
            assert str(self.config.num_blocks) in answer.error
            return
        assert not isinstance(answer, RequestEnded)
        self.clients[request_id] = Client(num_prompt, max_tokens, [])
        [choice] = answer.choices  # type: ignore[attr-defined]
        assert choice.handle not in self.handles, "handles are never reused"
        self.handles[choice.handle] = request_id

    @precondition(lambda self: any(not c.ended for c in self.clients.values()))
    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data: st.DataObject, stop: bool) -> None:
        alive = [name for name, client in self.clients.items() if not client.ended]
        name = data.draw(st.sampled_from(alive))
        event: Message = Stop(name, 0, 0) if stop else Abort(name, "attachment", "gone")
        [answer] = self.core.apply(event, self._next_id())
        assert isinstance(answer, RequestEnded)
        self.clients[name].ended = True

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
        self.core.apply(result, self._next_id())
        self._deliver(result)

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.pool.num_used + self.core.pool.num_free == self.config.num_blocks
        stats = self.core.stats()
        assert stats.num_kv_tokens <= stats.num_used_blocks * self.config.block_size
        alive = sum(not client.ended for client in self.clients.values())
        assert stats.num_running + stats.num_waiting == alive
        self._check_notes()

    def teardown(self) -> None:
        """Nobody starves: with no new arrivals everything ends, and all blocks come back."""
        if not hasattr(self, "core"):
            return
        for _ in range(20_000):
            self.plan()
            if not self.plans:
                break
            self.execute()
        assert all(client.ended for client in self.clients.values())
        assert self.core.pool.num_used == 0
        stats = self.core.stats()
        assert stats == notes.Stats(0, 0, 0, 0)

    def _deliver(self, result: StepResult) -> None:
        ended = set(result.ended_rows.tolist())
        rows = zip(result.handles.tolist(), result.tokens.tolist(), strict=True)
        for row, (handle, token) in enumerate(rows):
            client = self.clients[self.handles[handle]]
            if client.ended:
                continue
            position = client.num_prompt + len(client.output)
            assert token == drawn(handle, position)[0], "a position is sampled once, in order"
            client.output.append(token)
            client.ended = row in ended
            assert len(client.output) <= client.max_tokens

    def _check_notes(self) -> None:
        for note in self.core.take_notes():
            if isinstance(note, notes.Admitted) and not note.again:
                number = int(note.request_id[1:])
                assert all(int(name[1:]) < number for name in self.admitted), "FCFS"
                self.admitted.append(note.request_id)

    def _next_id(self) -> EntryId:
        self.num_entries += 1
        return EntryId(1, self.num_entries)


EngineMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestEngine = EngineMachine.TestCase


def test_a_long_random_run_ends_clean() -> None:
    """Many steps of one engine: calendars and arrays stay right over time."""
    rng = np.random.default_rng(7)
    config = SchedulerConfig(60, 4, 128, 16, 48, 2, 1, 1_000)
    core = Scheduler(config)
    worker = FakeWorker(config.block_size, config.max_num_batched_tokens, drawn)
    plans: deque[StepPlan] = deque()
    entries = 0
    for arrival in range(400):
        entries += 1
        prompt = range(int(rng.integers(1, 60)))
        asked = submit(f"r{arrival}", prompt=prompt, max_tokens=int(rng.integers(1, 60)))
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
    assert core.stats() == notes.Stats(0, 0, 0, 0)
    preempted = [note for note in core.take_notes() if isinstance(note, notes.Preempted)]
    assert preempted, "the pool was meant to be too small"
