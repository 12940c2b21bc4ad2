"""Beam searches find what a naive search finds, also after preemptions and recoveries."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core import events
from scheduler_svc.core.config import ProtocolError, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.beam_search import BeamSearch
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.outputs import (
    BeamCandidates,
    BeamsEnded,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Abort, Stop, Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.support.fake_beams import searched
from tests.support.fake_worker import FakeWorker
from tests.support.outputs_log import recovered
from tests.support.requests import submit


class Engine:
    """A core, a worker that lags behind it, and the outputs log between them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.log: list[Message] = []
        self.found: dict[str, list[tuple[tuple[int, ...], float]]] = {}
        self.preempted: list[str] = []
        self.epoch = 0
        self.start_epoch()

    def start_epoch(self) -> None:
        """Replace worker and scheduler; the new ones have only the log."""
        recovery = recovered(self.log, self.config.max_model_len)
        self.epoch += 1
        self.num_entries = 0
        self.log.append(EpochStarted(self.epoch, "scheduler", ("worker",)))
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(
            self.config.block_size,
            self.config.max_num_batched_tokens,
            lambda handle, position: (position * 3 + 1, False),
        )
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        for unfinished in recovery.in_order():
            self._note(
                self.core.recover(
                    unfinished.submit, unfinished.outputs(), unfinished.ended, unfinished.search
                )
            )

    def apply(self, message: Message) -> None:
        """An entry of requests, or the next one of outputs."""
        self.num_entries += 1
        if isinstance(message, StepResult):
            self.log.append(message)
        self._note(self.core.apply(message, EntryId(self.epoch, self.num_entries)))

    def plan(self) -> None:
        while (plan := self.core.schedule(0)) is not None:
            self.plans.append(plan)
        for event in self.core.take_events():
            if isinstance(event, events.Preempted):
                self.preempted.append(event.kind)

    def execute(self) -> None:
        self.results.append(self.worker.execute(self.plans.popleft()))

    def run(self) -> None:
        """Until nothing is left to do."""
        self.plan()
        while self.plans or self.results:
            if self.plans:
                self.execute()
            self.apply(self.results.popleft())
            self.plan()
        assert self.core.stats().num_waiting == self.core.stats().num_running == 0
        assert self.core.pool.num_used == self.core.host_pool.num_used == 0

    def _note(self, answers: list[Message]) -> None:
        self.log += answers
        for answer in answers:
            if isinstance(answer, BeamsEnded):
                assert answer.request_id not in self.found
                self.found[answer.request_id] = [
                    (tuple(found.tokens.tolist()), found.score) for found in answer.hypotheses
                ]


def beams_of(request: Submit) -> list[tuple[tuple[int, ...], float]]:
    """What a request with beams must come to."""
    params = request.sampling.beams
    assert params is not None
    return searched(tuple(request.prompt.tolist()), request.sampling.max_tokens, params)


def config(num_blocks: int, block_size: int = 4, num_host_blocks: int = 0) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks, block_size, 80, 24, 48, 2, 0, 100, num_host_blocks=num_host_blocks
    )


def beam_request(name: str, width: int, max_tokens: int = 12, num_prompt: int = 5) -> Submit:
    params = BeamParams(width, 1.0, EarlyStopping.ESTIMATED)
    prompt = range(hash(name) % 17, hash(name) % 17 + num_prompt)
    return submit(name, prompt, num_choices=width, max_tokens=max_tokens, beams=params)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_one_search_alone(width: int, length_penalty: float, early_stopping: EarlyStopping) -> None:
    engine = Engine(config(200))
    params = BeamParams(width, length_penalty, early_stopping)
    requests = [
        submit(f"r{number}", [number, 3, 5], num_choices=width, max_tokens=20, beams=params)
        for number in range(6)
    ]
    for request in requests:
        engine.apply(request)
        engine.run()
        assert engine.found[request.request_id] == beams_of(request)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_many_searches_in_a_pool_that_is_too_small(seed: int) -> None:
    """Preempted either way, while results are on their way or not; the engine dies now and then."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    num_blocks = rng.choice([84, 110]) // block_size
    engine = Engine(config(num_blocks, block_size, rng.choice([0, 8, 60])))
    coming: list[Submit] = []
    for number in range(8):
        width = rng.randint(1, 4)
        penalty, early = rng.choice([-1.0, 0.5, 1.0]), rng.choice(list(EarlyStopping))
        first = rng.choice([0, number])
        coming.append(
            submit(
                f"r{number}",
                range(first, first + rng.randint(3, 9)),
                max_tokens=rng.randint(1, 14),
                num_choices=width,
                beams=BeamParams(width, penalty, early) if rng.random() < 0.7 else None,
            )
        )
    requests = list(coming)
    dies = rng.random() < 0.4
    while coming or engine.plans or engine.results:
        if coming and rng.random() < 0.6:
            engine.apply(coming.pop())
            assert isinstance(engine.log[-1], RequestState), "all of them fit"
        if rng.random() < 0.8:
            engine.plan()
        if engine.plans and rng.random() < 0.7:
            engine.execute()
        if engine.results and rng.random() < 0.7:
            engine.apply(engine.results.popleft())
        if dies and rng.random() < 0.03:
            engine.start_epoch()
    engine.run()
    expected = {r.request_id: beams_of(r) for r in requests if r.sampling.beams is not None}
    assert engine.found == expected


def test_beams_share_what_they_have_in_common() -> None:
    engine = Engine(config(200, block_size=4))
    engine.apply(beam_request("r", 4, max_tokens=30, num_prompt=40))
    most_used = 0
    engine.plan()
    while engine.plans:
        engine.execute()
        engine.apply(engine.results.popleft())
        engine.plan()
        most_used = max(most_used, engine.core.pool.num_used)
    unshared = 4 * (40 + 30) // 4
    assert 10 < most_used < unshared - 3 * 9


def test_an_aborted_search_leaves_nothing_behind() -> None:
    for num_steps in range(6):
        engine = Engine(config(60, num_host_blocks=8))
        engine.apply(beam_request("r", 3))
        engine.plan()
        for _ in range(num_steps):
            engine.execute()
            engine.apply(engine.results.popleft())
            engine.plan()
        engine.apply(Stop("r", 0, 1))  # means nothing to a search
        engine.apply(Abort("r", "attachment", "gone"))
        assert isinstance(engine.log[-1], RequestEnded)
        engine.run()
        assert engine.found == {}


def test_a_search_that_had_ended_when_the_scheduler_died_is_ended_by_the_next() -> None:
    engine = Engine(config(60))
    request = beam_request("r", 2, max_tokens=1)
    engine.apply(request)
    engine.plan()
    engine.execute()
    engine.log.append(engine.results.popleft())  # no service has read it
    engine.start_epoch()
    assert engine.found == {"r": beams_of(request)}
    engine.run()


def test_a_state_in_the_log_holds_all_of_a_search() -> None:
    engine = Engine(config(60))
    request = beam_request("r", 3, max_tokens=12)
    engine.apply(request)
    engine.plan()
    for _ in range(7):
        engine.execute()
        engine.apply(engine.results.popleft())
        engine.plan()
    group = engine.core.find("r")
    assert group is not None
    state = engine.core.state_of(group)
    engine.log = [state]
    engine.start_epoch()
    assert isinstance(engine.log[-1], RequestState)
    assert [choice.output.tolist() for choice in engine.log[-1].choices] == [
        choice.output.tolist() for choice in state.choices
    ]
    engine.run()
    assert engine.found == {"r": beams_of(request)}


def test_too_few_continuations_are_an_error_not_a_hang() -> None:
    engine = Engine(config(60))
    engine.apply(beam_request("r", 2))
    engine.plan()
    result = engine.worker.execute(engine.plans.popleft())
    none = np.empty(0, np.int32)
    [candidates] = result.beams
    empty = BeamCandidates(candidates.group, none, none, np.empty(0, np.float32), none)
    object.__setattr__(result, "beams", (empty,))
    engine.apply(result)
    ended = engine.log[-1]
    assert isinstance(ended, RequestEnded)
    assert ended.error == "the model's logits allow 0 of 2 beams"


def test_a_result_without_the_candidates_it_owes_ends_the_epoch() -> None:
    engine = Engine(config(60))
    engine.apply(beam_request("r", 2))
    engine.plan()
    result = engine.worker.execute(engine.plans.popleft())
    object.__setattr__(result, "beams", ())
    with pytest.raises(ProtocolError, match="nothing about beam search"):
        engine.apply(result)


@pytest.mark.parametrize("parent", [-1, 1])
def test_candidates_of_beams_that_are_not_there_are_refused(parent: int) -> None:
    search = BeamSearch(BeamParams(2, 1.0, EarlyStopping.ESTIMATED), 10)
    ints = np.array([parent], np.int32)
    with pytest.raises(ProtocolError, match=f"candidate of beam {parent}, there are 1"):
        search.advance(BeamCandidates(1, ints, ints, np.zeros(1, np.float32), ints))
