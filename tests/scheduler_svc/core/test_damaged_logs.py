"""No entry of a log, whatever is in it, stops a scheduler from starting and finishing the rest."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from scheduler_svc.core.config import ProtocolError, SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.epoch import replay_until, start_epoch
from scheduler_svc.recovery import Recovery, resume
from shared.bus.api import Append, EntryId
from shared.bus.keys import EngineKeys
from shared.bus.memory import MemoryBus
from shared.codec import Message, decode, encode
from shared.errors import DecodeError
from shared.messages.outputs import (
    BeamCandidates,
    BeamsEnded,
    ChoiceState,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Abort, Attach, ChoiceView, Stop
from shared.sampling import BeamParams, EarlyStopping
from tests.scheduler_svc.test_recovery import STARTED, result, state
from tests.support.fake_worker import FakeWorker
from tests.support.outputs_log import recovered
from tests.support.requests import pin, submit

CONFIG = SchedulerConfig(64, 4, 96, 8, 64, 2, 0, 1_000, max_pinned_blocks=8, vocab_size=1_000)
OUTPUTS = "outputs"
BEAMS = BeamParams(2, 1.0, EarlyStopping.ESTIMATED)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


GOOD = result(1, {1: 10, 2: 20}, ended=[2])
MALFORMED = {
    "more tokens than handles": replace(GOOD, tokens=ints(1, 2, 3)),
    "fewer tokens than handles": replace(GOOD, tokens=ints(1)),
    "a negative token": replace(GOOD, tokens=ints(10, -1)),
    "a token that the vocabulary has not": replace(GOOD, tokens=ints(10, 1_000)),
    "two tokens for one sequence": replace(GOOD, handles=ints(1, 1)),
    "an end behind the last row": replace(GOOD, ended_rows=ints(2)),
    "an end before the first row": replace(GOOD, ended_rows=ints(-1)),
    "two ends of a row": replace(GOOD, ended_rows=ints(1, 1), ended_flags=ints(1, 1)),
    "an unknown flag": replace(GOOD, ended_flags=ints(9)),
    "an end without a flag": replace(GOOD, ended_flags=ints()),
    "a flag without an end": replace(GOOD, ended_rows=ints()),
    "admissions without counts": replace(GOOD, admitted_handles=ints(1)),
}


@dataclass
class Engine:
    """A core, a worker without a model, and all messages that were in the two logs."""

    core: Scheduler = field(default_factory=lambda: Scheduler(CONFIG))
    worker: FakeWorker = field(default_factory=lambda: FakeWorker(4, 64, _draw))
    plans: deque[StepPlan] = field(default_factory=deque)
    outputs: list[Message] = field(default_factory=list)
    num_entries: int = 0

    def give(self, *messages: Message) -> None:
        """Entries of requests, or of outputs."""
        for message in messages:
            self.num_entries += 1
            answers = self.core.apply(message, EntryId(5, self.num_entries))
            if isinstance(message, StepResult):
                self.outputs.append(message)
            self.answer(answers)

    def answer(self, answers: list[Message]) -> None:
        for answer in answers:
            self.outputs.append(answer)
            self.num_entries += 1
            self.core.apply(answer, EntryId(5, self.num_entries))

    def turn(self) -> bool:
        """Plan all that can be planned and execute one plan; whether there was one."""
        while (plan := self.core.schedule(0)) is not None:
            self.plans.append(plan)
        self.answer(self.core.take_answers())
        if self.plans:
            self.give(self.worker.execute(self.plans.popleft()))
        return bool(self.plans) or self.core.has_running

    def run(self) -> None:
        """Until everything has ended."""
        for _ in range(2_000):
            if not self.turn() and not self.core.has_work:
                return
        raise AssertionError(f"{self.core.num_requests} requests do not end")


def _draw(handle: int, position: int) -> tuple[int, bool]:
    ends = position >= CONFIG.max_model_len - 1  # as a worker finds by itself
    return (handle * 31 + position * 17) % 97, ends


def some_requests() -> list[Message]:
    return [
        submit("one", range(10), max_tokens=20, tenant="alice"),
        submit("two", range(20, 29), max_tokens=15, num_choices=2),
        submit("beams", range(5), max_tokens=6, num_choices=2, beams=BEAMS),
        pin("prefix", range(12)),
    ]


# ------------------------------------------------------------------------- one entry


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_result_ends_the_epoch(bad: StepResult) -> None:
    engine = Engine()
    engine.give(submit("a", max_tokens=9), submit("b", max_tokens=9))
    for _ in range(2):
        assert engine.core.schedule(0) is not None
    before = [found.output.tolist() for found in _sequences(engine.core)]
    with pytest.raises(ProtocolError):
        engine.core.apply(bad, EntryId(5, 99))
    assert [found.output.tolist() for found in _sequences(engine.core)] == before
    assert engine.core.num_requests == 2


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_result_stops_no_later_start(bad: StepResult) -> None:
    bus = MemoryBus(lambda: 5)
    log = (STARTED, state("a", 1, [7]), state("b", 2, [8]), result(1, {1: 9, 2: 9}))
    for message in (*log, replace(bad, step=2), result(3, {1: 50, 2: 60})):
        await bus.append(Append(OUTPUTS, [encode(message)], 5))
    recovery = Recovery(CONFIG.max_model_len)
    await replay_until(bus, OUTPUTS, EntryId(8, 0), recovery, CONFIG.vocab_size)
    # What came before counts, and nothing behind is joined to it.
    found = {one.submit.request_id: one.outputs()[0].tolist() for one in recovery.in_order()}
    assert found == {"a": [7, 9], "b": [8, 9]}


def test_a_result_of_an_unknown_sequence_changes_nothing() -> None:
    engine = Engine()
    engine.give(submit("a", max_tokens=3))
    assert engine.core.schedule(0) is not None
    engine.core.apply(result(1, {1: 10, 77: 20, -5: 30}), EntryId(5, 9))
    [sequence] = _sequences(engine.core)
    assert engine.core._planner.output(sequence).tolist() == [10]


def _sequences(core: Scheduler) -> list[Any]:
    return [sequence for group in core._known.by_request.values() for sequence in group.sequences]


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (submit("r", num_choices=0), "num_choices=0"),
        (submit("r", num_choices=-1), "num_choices=-1"),
        (submit("r", [1, -2, 3]), "token -2"),
        (submit("r", [1, 2, 1_000]), "token 1000"),
        (submit("r", max_tokens=0), "max_tokens=0"),
        (submit("r", num_choices=2, beams=replace(BEAMS, width=3)), "width=3"),
        (
            submit("r", num_choices=2, beams=replace(BEAMS, length_penalty=float("nan"))),
            "length_penalty=nan",
        ),
        (Attach("r", "g", "a", submit("other"), (), exact=False), "request_id='other'"),
        (Attach("r", "g", "a", None, (ChoiceView(ints(-1), ""),), exact=False), "token -1"),
        (Attach("r", "g", "a", None, (ChoiceView(ints(), "tired"),), exact=False), "tired"),
        (Stop("r", 0, -1), "num_tokens=-1"),
    ],
)
def test_a_request_that_cannot_be_is_named_and_changes_nothing(message: Message, word: str) -> None:
    engine = Engine()
    with pytest.raises(DecodeError, match=word) as raised:
        engine.core.apply(message, EntryId(5, 1))
    assert raised.value.request_id == "r"
    assert engine.core.num_requests == 0


def test_more_choices_than_can_run_are_refused_without_being_made() -> None:
    engine = Engine()
    answer, *_ = engine.core.apply(submit("r", num_choices=2**62), EntryId(5, 1))
    assert isinstance(answer, RequestEnded)
    assert "at most 8" in answer.error


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_a_length_penalty_that_no_number_can_hold_ends_no_scheduler(penalty: float) -> None:
    config = replace(CONFIG, num_blocks=2_000, max_model_len=4_000)
    core, plans = Scheduler(config), 0
    beams = BeamParams(1, penalty, EarlyStopping.NEVER)
    core.apply(submit("r", max_tokens=3_000, beams=beams), EntryId(5, 1))
    search = core._known.by_request["r"].search
    assert search is not None
    engine = Engine(core, FakeWorker(4, 64, _draw))
    while core.num_requests and plans < 3_500:
        engine.turn()
        plans += 1
    assert not core.num_requests


@pytest.mark.parametrize("num_finished", [0, 1, 2])
def test_a_search_without_running_beams_ends(num_finished: int) -> None:
    asked = submit("beams", range(5), max_tokens=6, num_choices=2, beams=BEAMS)
    finished = tuple(beam(0, "stop") for _ in range(num_finished))  # and its BeamsEnded is lost
    engine = Engine()
    recovery = recovered([STARTED, RequestState(asked, finished, "0-0")], CONFIG.max_model_len)
    engine.answer(resume(engine.core, recovery, EntryId(6, 0)))
    engine.run()
    assert not engine.core.num_requests
    assert isinstance(engine.outputs[-1], RequestEnded if num_finished == 1 else BeamsEnded)


def test_a_search_whose_prompt_is_too_long_for_the_new_worker_ends_with_what_has_finished() -> None:
    beams = BeamParams(2, 0.5, EarlyStopping.NEVER)
    asked = submit("beams", range(100), max_tokens=6, num_choices=2, beams=beams)
    choices = (*(beam(7, "") for _ in range(2)), *(beam(0, "stop") for _ in range(2)))
    found = BeamCandidates(
        7, ints(0, 1), ints(3, 4), np.array([-2, -3], np.float32), flags=ints(0, 0)
    )
    step = replace(result(1, {}), beams=(found,))
    state = RequestState(asked, choices, "0-0")
    recovery = recovered([STARTED, state, step], CONFIG.max_model_len)
    [answer] = resume(Scheduler(CONFIG), recovery, EntryId(6, 0))
    assert isinstance(answer, BeamsEnded)
    assert [found.tokens.tolist() for found in answer.hypotheses] == [[1], [1]]


def beam(handle: int, finish_reason: str) -> ChoiceState:
    return ChoiceState(0, handle, ints(1), finish_reason, np.array([-1], np.float32))


def test_choices_of_which_the_log_holds_more_of_one_go_on_together() -> None:
    core = Scheduler(CONFIG)
    known = submit("r", num_choices=2, max_tokens=9)
    core.recover(known, {0: ints(1, 2, 3), 1: ints(4)}, {})
    engine = Engine(core)
    engine.run()
    assert not core.num_requests


async def test_a_cursor_beyond_the_end_of_requests_hides_no_request() -> None:
    bus, keys = MemoryBus(lambda: 5), EngineKeys("e")
    await bus.append(Append(keys.outputs, [encode(STARTED)], 5))
    far = state("a", 1, [7], cursor="99999999999999-7")
    await bus.append(Append(keys.outputs, [encode(far)], 5))
    await bus.append(Append(keys.requests, [encode(submit("new"))]))
    started = await start_epoch(bus, keys, CONFIG, "scheduler", ("worker",), None)
    last = await bus.last_id(keys.requests)
    assert started.core.requests_cursor <= last


# ------------------------------------------------------------------------- any entry

_INTS = (-1, 0, 1, 2, 7, 999, 1_000, 2**31 - 1, 2**31, 2**63 - 1, -(2**63))
_ARRAY_INTS = (-1, 0, 1, 2, 5, 999, 1_000, 2**31 - 1)
_FLOATS = (0.0, -1.0, 1e308, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "junk", "9-9", "-", "99999999999999999999-1", "stop", "error")


def damaged(message: Message, rng: random.Random) -> Message | None:
    """The message with one field of the same type but another value, if that can be decoded."""
    data = msgpack.unpackb(encode(message))
    places = [place for place in _places(data) if place[1] not in ("t", "v")]
    holder, key = rng.choice(places)
    holder[key] = _other(holder[key], rng)
    try:
        return decode(msgpack.packb(data))
    except DecodeError:
        return None


def _places(data: Any) -> list[tuple[Any, Any]]:
    found = []
    keys = data.keys() if isinstance(data, dict) else range(len(data))
    for key in keys:
        found.append((data, key))
        if isinstance(data[key], dict | list):
            found += _places(data[key])
    return found


def _other(value: Any, rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(_INTS)
        case float():
            return rng.choice(_FLOATS)
        case str():
            return rng.choice(_TEXTS)
        case bytes():
            return ints(*rng.choices(_ARRAY_INTS, k=rng.randrange(5))).tobytes()
        case list():
            return rng.choice([[], value * 2, value[:-1]])
        case None:
            return rng.choice(_INTS)
    return {}


def test_any_damaged_entry_of_outputs_lets_the_next_scheduler_start_and_finish() -> None:
    engine = Engine()
    engine.give(*some_requests())
    for _ in range(12):
        engine.turn()
    log: list[Message] = [EpochStarted(5, "scheduler", ("worker",)), *engine.outputs]
    rng = random.Random(1)
    num_damaged = 0
    for _ in range(400):
        where = rng.randrange(len(log))
        bad = damaged(log[where], rng)
        if bad is None:
            continue
        num_damaged += 1
        messages = (*log[:where], bad, *log[where + 1 :])
        recovery = recovered(messages, CONFIG.max_model_len, epoch=5, vocab_size=CONFIG.vocab_size)
        later = Engine(Scheduler(CONFIG))
        later.answer(resume(later.core, recovery, EntryId(5, 0)))
        later.run()
        assert not later.core.num_requests
    assert num_damaged > 200


def test_any_damaged_result_ends_the_epoch_at_most() -> None:
    rng = random.Random(2)
    num_refused = 0
    for _ in range(300):
        engine = Engine()
        engine.give(*some_requests())
        for _ in range(rng.randrange(10)):
            engine.turn()
        while (plan := engine.core.schedule(0)) is not None:
            engine.plans.append(plan)
        bad = damaged(engine.worker.execute(engine.plans.popleft()), rng)
        if bad is None:
            continue
        try:
            engine.give(bad)
        except ProtocolError:
            num_refused += 1
    assert num_refused > 50


def test_any_damaged_request_is_refused_or_served() -> None:
    rng = random.Random(3)
    views = (ChoiceView(ints(1, 2), ""), ChoiceView(ints(1), "stop"))
    requests: list[Message] = [
        *some_requests(),
        Attach("two", "g", "a.1", None, views, exact=False),
        Attach("new", "g", "a.1", submit("new", num_choices=2), views, exact=True),
        Stop("two", 0, 1),
        Abort("one", "attachment", "gone"),
    ]
    num_refused = 0
    for _ in range(400):
        engine = Engine()
        where = rng.randrange(len(requests))
        bad = damaged(requests[where], rng)
        if bad is None:
            continue
        for message in (*requests[:where], bad, *requests[where + 1 :]):
            try:
                engine.give(message)
            except DecodeError:
                num_refused += 1
                engine.core.skip_request(EntryId(5, engine.num_entries))
            engine.turn()
        engine.run()
        assert not engine.core.num_requests
    assert num_refused > 20
