"""A client's view wins, whatever the log has kept of its request."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recovery import Recovery, resume
from shared.bus.api import EntryId
from shared.codec import Message
from shared.messages.outputs import BeamsEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted, StepPlan
from shared.messages.requests import Abort, Attach, ChoiceView, Drain, GatewayLost, Stop, Submit
from shared.sampling import BeamParams, EarlyStopping
from tests.support.fake_worker import FakeWorker
from tests.support.requests import submit


def token_at(position: int) -> int:
    return position * 3 + 1


class Engine:
    """A core, a worker, and the outputs log as a gateway reads it."""

    def __init__(self, **changes: int) -> None:
        values = {"num_blocks": 64, "max_plans_in_flight": 2, "num_host_blocks": 0, **changes}
        self.config = SchedulerConfig(
            block_size=4,
            max_model_len=200,
            max_num_sequences=16,
            max_num_batched_tokens=64,
            num_watermark_blocks=0,
            outputs_retention=1_000,
            **values,
        )
        self.log: list[Message] = []
        self.epoch = 0
        self.start_epoch()

    def start_epoch(self, suspects: Sequence[int] = ()) -> None:
        recovery = Recovery(self.config.max_model_len)
        recovery.add(self.log)
        self.epoch += 1_000
        self.num_entries = 0
        found = np.array(suspects, np.int32)
        self.log.append(EpochStarted(self.epoch, "scheduler", ("worker",), found))
        recovery.add(self.log[-1:])
        self.core = Scheduler(self.config)
        self.worker = FakeWorker(4, 64, lambda handle, position: (token_at(position), False))
        self.plans: deque[StepPlan] = deque()
        self.log += resume(self.core, recovery, EntryId(self.epoch, 0))

    def tell(self, message: Message) -> list[Message]:
        self.num_entries += 1
        if isinstance(message, StepResult):
            self.log.append(message)
        answers = self.core.apply(message, EntryId(self.epoch, self.num_entries))
        self.log += answers
        return answers

    def plan(self, now_ms: int = 0) -> None:
        while (plan := self.core.schedule(now_ms)) is not None:
            self.plans.append(plan)
        self.log += self.core.take_answers()

    def step(self, count: int = 1) -> None:
        """So many results, each followed by new plans and the states that somebody waits for."""
        for _ in range(count):
            self.plan()
            self.tell(self.worker.execute(self.plans.popleft()))
            self.plan()

    def run(self) -> None:
        self.plan()
        while self.plans:
            self.step()

    def owed(self) -> list[RequestState]:
        """States that the service appends right behind what was applied."""
        states = self.core.checkpoints() if self.core.needs_checkpoint else []
        self.log += states
        for state in states:
            self.tell(state)
        return states

    def outputs(self, request_id: str) -> dict[int, list[int]]:
        """What a reader of the whole log has of the choices in the end."""
        recovery = Recovery(self.config.max_model_len)
        recovery.add(self.log)
        if (known := recovery.finished.find(request_id)) is not None:
            choices = known.choices
            return {number: found.output.tolist() for number, found in choices.items()}
        found = recovery.unfinished[request_id].outputs()
        return {number: output.tolist() for number, output in found.items()}


def view(*tokens: int, finish_reason: str = "") -> ChoiceView:
    return ChoiceView(np.array(tokens, np.int32), finish_reason)


def attach(
    request: Submit,
    *views: ChoiceView,
    attachment: str = "second",
    knows: bool = True,
    exact: bool = False,
    overtaken: tuple[str, ...] = (),
) -> Attach:
    """By a delivery that knows of those that were ``overtaken``."""
    found = None
    if knows:
        found = replace(request, attachment=attachment, overtaken=overtaken)
    return Attach(request.request_id, "other", attachment, found, views, exact)


def expected(num_prompt: int, count: int) -> list[int]:
    return [token_at(position) for position in range(num_prompt, num_prompt + count)]


REQUEST = submit("r", range(5), max_tokens=12)


@pytest.mark.parametrize("num_seen", [0, 2, 3])
def test_who_has_less_than_the_log_is_told_the_rest(num_seen: int) -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(3)
    assert engine.tell(attach(REQUEST, view(*expected(5, num_seen)))) == []
    [state] = engine.owed()
    assert state.submit.attachment == "second"
    assert state.submit.gateway == "other"
    assert state.choices[0].output.tolist() == expected(5, 3)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


@pytest.mark.parametrize(
    "tokens",
    [[100, 101], [*expected(5, 3), 100], [*expected(5, 2), 100], [16, 19, 22, 25, 28, 100]],
)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
def test_who_has_something_else_gets_more_of_that(tokens: list[int], num_steps: int) -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(num_steps)
    [state] = engine.tell(attach(REQUEST, view(*tokens)))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == tokens
    engine.run()
    rest = expected(5 + len(tokens), 12 - len(tokens))
    assert engine.outputs("r") == {0: tokens + rest}
    assert engine.core.pool.num_used == 0


def test_exactly_what_the_client_has_is_continued_if_it_asks_for_that() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(4)
    [state] = engine.tell(attach(REQUEST, view(*expected(5, 2)), exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 2)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_a_client_without_anything_may_ask_for_all_of_it_anew() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(4)
    [state] = engine.tell(attach(REQUEST, exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == []
    engine.run()
    [state] = engine.tell(attach(REQUEST, view(*expected(5, 3)), exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 3)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_who_was_overtaken_is_remembered_once() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    first = REQUEST.attachment
    for attachment, overtaken in (
        ("second", (first,)),
        ("second", (first,)),
        ("third", (first, "second")),
        ("third.1", (first, "second")),
        ("third", (first, "second")),  # an Attach may be repeated late
    ):
        engine.tell(attach(REQUEST, knows=False, attachment=attachment))
        [state] = engine.owed()
        assert (state.submit.attachment, state.submit.overtaken) == (attachment, overtaken)


def taken_over_twice() -> Engine:
    """Three tokens into REQUEST; the delivery that was second is not any more."""
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(3)
    for attachment in ("second", "third"):
        engine.tell(attach(REQUEST, knows=False, attachment=attachment))
    return engine


def stale(attachment: str) -> Attach:
    """By one that was taken over, and wants log-probabilities."""
    return attach(REQUEST, view(*expected(5, 1)), attachment=attachment, exact=True)


@pytest.mark.parametrize("attachment", [f"{REQUEST.attachment}.1", "second", "second.7"])
@pytest.mark.parametrize("restarts", [False, True])
def test_who_was_taken_over_does_not_take_back(restarts: bool, attachment: str) -> None:
    engine = taken_over_twice()
    engine.owed()
    if restarts:
        engine.start_epoch()
    assert engine.tell(stale(attachment)) == []
    [state] = engine.owed()  # so that it learns of it
    assert (state.submit.attachment, state.submit.overtaken[-1]) == ("third", "second")
    assert state.choices[0].output.tolist() == expected(5, 3)


def test_who_was_taken_over_does_not_begin_anew_what_has_ended() -> None:
    engine = taken_over_twice()
    engine.run()
    [state] = engine.tell(stale("second.1"))
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third"
    assert state.choices[0].finish_reason == "length"


def test_who_was_taken_over_after_the_end_does_not_begin_anew() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.run()
    for attachment in ("second", "third"):
        [state] = engine.tell(attach(REQUEST, view(*expected(5, 2)), attachment=attachment))
    [state] = engine.tell(stale("second.1"))
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third"


def test_who_was_taken_over_has_again_what_the_other_gave_up() -> None:
    engine = taken_over_twice()
    engine.tell(Abort("r", "third", "its client left"))
    [state] = engine.tell(stale("second.1"))
    assert isinstance(state, RequestState)
    assert (state.submit.attachment, state.submit.overtaken[-1]) == ("second.1", "third")
    assert "second" not in state.submit.overtaken


def test_who_begins_anew_what_has_ended_has_taken_it_over() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.run()
    [state] = engine.tell(attach(REQUEST, view(), attachment="second", exact=True))
    assert isinstance(state, RequestState)
    assert state.submit.overtaken == (REQUEST.attachment,)
    assert engine.tell(stale(f"{REQUEST.attachment}.1")) == []
    [state] = engine.owed()
    assert state.submit.attachment == "second"


def test_who_was_overtaken_as_only_a_client_knows_is_remembered_again() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    knows = attach(REQUEST, view(100), attachment="third.1", overtaken=("second",))
    [state] = engine.tell(knows)
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third.1"
    assert set(state.submit.overtaken) == {REQUEST.attachment, "second"}


def test_only_so_many_deliveries_are_remembered() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    for number in range(100):
        engine.tell(attach(REQUEST, knows=False, attachment=f"delivery {number}"))
    [state] = engine.owed()
    assert state.submit.overtaken == tuple(f"delivery {number}" for number in range(67, 99))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_who_comes_back_is_not_too_late_for_a_turn_that_was_had(
    is_known: bool, exact: bool
) -> None:
    engine = Engine(queue_ttl_ms=100)
    if is_known:
        engine.tell(REQUEST)
        engine.run()
    engine.tell(attach(REQUEST, view(), exact=exact))
    engine.plan(now_ms=1_000)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_who_was_never_heard_of_may_be_too_late() -> None:
    engine = Engine(queue_ttl_ms=100)
    engine.tell(replace(attach(REQUEST, view()), is_new=True))
    engine.plan(now_ms=1_100)  # the epoch began at 1,000
    assert not engine.plans
    [ended] = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert ended.reason == "deadline"


def test_a_request_that_the_log_has_lost_goes_on_from_the_view() -> None:
    engine = Engine()
    [state] = engine.tell(attach(REQUEST, view(7, 8)))
    assert isinstance(state, RequestState)
    engine.run()
    assert engine.outputs("r") == {0: [7, 8, *expected(7, 10)]}


def test_nobody_knows_a_request_that_nobody_describes() -> None:
    [answer] = Engine().tell(attach(REQUEST, knows=False))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"


def without_prompt(message: Attach) -> Attach:
    assert message.submit is not None
    return replace(message, submit=message.submit.without_prompt())


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_prompt_that_the_log_holds_is_not_written_again(dies: bool, is_told: bool) -> None:
    engine = Engine()
    for state in engine.tell(REQUEST):
        engine.tell(state)
    engine.step(3)
    view_of_client = view(7) if is_told else view(*expected(5, 2))  # another history, or the log's
    [state] = [
        *engine.tell(without_prompt(attach(REQUEST, view_of_client))),
        *engine.owed(),
    ]
    assert isinstance(state, RequestState)
    assert (state.submit.prompt.tolist(), state.submit.attachment) == ([], "second")
    if dies:
        engine.start_epoch()
        assert isinstance(engine.log[-1], RequestState)
        assert engine.log[-1].submit.prompt.tolist() == REQUEST.prompt.tolist()
    engine.run()
    assert len(engine.outputs("r")[0]) == 12


def test_a_gateway_that_has_only_an_id_is_told_the_prompt() -> None:
    engine = Engine()
    for state in engine.tell(REQUEST):
        engine.tell(state)
    engine.step(2)
    engine.tell(attach(REQUEST, knows=False))
    engine.tell(without_prompt(attach(REQUEST, attachment="third", overtaken=("second",))))
    [state] = engine.owed()
    assert state.submit.prompt.tolist() == REQUEST.prompt.tolist()
    engine.run()
    [bare] = engine.tell(without_prompt(attach(REQUEST, attachment="fourth")))
    [whole] = engine.tell(attach(REQUEST, attachment="fifth", knows=False))
    assert isinstance(bare, RequestState)
    assert isinstance(whole, RequestState)
    assert (len(bare.submit.prompt), len(whole.submit.prompt)) == (0, 5)


def test_a_prompt_that_is_only_named_must_be_known() -> None:
    engine = Engine()
    [answer] = engine.tell(without_prompt(attach(REQUEST, view(7, 8))))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"
    engine.tell(REQUEST)
    engine.run()
    other = attach(submit("r", range(6), max_tokens=12), view(7, 8))
    [answer] = engine.tell(without_prompt(other))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"
    [state] = engine.tell(without_prompt(attach(REQUEST, view(7, 8))))  # it goes on after all
    assert isinstance(state, RequestState)
    assert len(state.submit.prompt) == 5
    engine.run()
    assert engine.outputs("r") == {0: [7, 8, *expected(7, 10)]}


def test_a_state_whose_prompt_the_log_has_lost_is_lost_with_it() -> None:
    engine = Engine()
    for state in engine.tell(REQUEST):
        engine.tell(state)
    engine.tell(without_prompt(attach(REQUEST)))
    [bare] = engine.owed()
    engine.log = [engine.log[0], bare]
    engine.start_epoch()
    assert engine.core.num_requests == 0
    [answer] = engine.tell(without_prompt(attach(REQUEST, attachment="third")))
    assert isinstance(answer, RequestEnded)
    [state] = engine.tell(attach(REQUEST, attachment="third"))
    assert isinstance(state, RequestState)
    assert len(state.submit.prompt) == 5


@pytest.mark.parametrize("dies", [False, True])
def test_what_has_ended_is_told_for_a_while(dies: bool) -> None:
    engine = Engine(resume_window_ms=5_000)
    engine.tell(REQUEST)
    engine.run()
    if dies:
        engine.start_epoch()
    [state] = engine.tell(attach(REQUEST, knows=False))
    assert isinstance(state, RequestState)
    [choice] = state.choices
    assert (choice.output.tolist(), choice.finish_reason) == (expected(5, 12), "length")
    engine.plan(now_ms=engine.epoch + 4_999)
    assert isinstance(engine.tell(attach(REQUEST, knows=False))[0], RequestState)
    engine.plan(now_ms=engine.epoch + 5_001)
    assert isinstance(engine.tell(attach(REQUEST, knows=False))[0], RequestEnded)


def test_views_of_choices_that_are_not_there_are_no_views() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(3)
    assert engine.tell(attach(REQUEST, view(1), view(2))) == []
    engine.run()
    [state] = engine.tell(attach(REQUEST, view(1), view(2), view(3)))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 12)


def test_who_has_seen_every_end_is_told_so_again() -> None:
    engine = Engine()
    seen = view(7, 8, finish_reason="stop")
    for knows in (True, False):
        [state] = engine.tell(attach(REQUEST, seen, knows=knows))
        assert isinstance(state, RequestState)
        assert state.choices[0].output.tolist() == [7, 8]


def test_deadlines_of_what_has_ended_are_not_kept() -> None:
    engine = Engine()
    for number in range(3_000):
        request = submit(f"r{number}", range(5))
        object.__setattr__(request, "deadline_ms", 10**15)
        engine.tell(request)
        engine.tell(Abort(request.request_id, "attachment", "gone"))
    assert len(engine.core._requests._deadlines._due) <= 1_024


def test_a_client_that_saw_another_end_gets_its_own() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.run()
    [state] = engine.tell(attach(REQUEST, view(1, 2, 3)))
    assert isinstance(state, RequestState)
    engine.run()
    assert engine.outputs("r") == {0: [1, 2, 3, *expected(8, 9)]}


def test_several_choices_are_rewound_together() -> None:
    request = submit("r", range(5), num_choices=3, max_tokens=12)
    engine = Engine()
    engine.tell(request)
    engine.step(4)
    engine.tell(Stop("r", 1, 2))
    views = (view(1, 2, 3), view(9, 9, finish_reason="stop"), view(4, 5, 6))
    [state] = engine.tell(attach(request, *views))
    assert isinstance(state, RequestState)
    engine.run()
    rest = expected(8, 9)
    assert engine.outputs("r") == {0: [1, 2, 3, *rest], 1: [9, 9], 2: [4, 5, 6, *rest]}
    assert engine.core.pool.num_used == 0


def test_views_of_different_lengths_that_differ_from_the_log_end_with_an_error() -> None:
    request = submit("r", range(5), num_choices=2, max_tokens=12)
    engine = Engine()
    engine.tell(request)
    engine.step(4)
    [answer] = engine.tell(attach(request, view(1, 2, 3), view(4)))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "error"
    engine.run()
    assert engine.core.pool.num_used == 0


def test_a_view_that_has_reached_the_limit_has_ended() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(2)
    [state] = engine.tell(attach(REQUEST, view(*range(12))))
    assert isinstance(state, RequestState)
    assert state.choices[0].finish_reason == "length"
    assert not engine.core.has_running


def test_a_preempted_request_is_rewound_as_any_other() -> None:
    for host in (0, 40):
        engine = Engine(num_blocks=8, num_host_blocks=host)
        other = submit("first", range(50, 59), max_tokens=20)
        engine.tell(other)
        engine.tell(REQUEST)
        engine.step(11)
        assert engine.core.stats().num_waiting == 1, "the pool was meant to be too small"
        engine.tell(attach(REQUEST, view(1, 2)))
        engine.run()
        assert engine.outputs("r") == {0: [1, 2, *expected(7, 10)]}
        assert engine.outputs("first") == {0: expected(9, 20)}
        assert engine.core.pool.num_used == engine.core.host_pool.num_used == 0


def test_an_abort_of_an_earlier_delivery_means_nothing() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.tell(attach(REQUEST))
    assert engine.tell(Abort("r", "attachment", "gone")) == []
    [answer] = engine.tell(Abort("r", "second", "gone"))
    assert isinstance(answer, RequestEnded)


def test_an_abort_that_overtakes_its_request_ends_it() -> None:
    engine = Engine()
    assert engine.tell(Abort("r", "attachment", "gone")) == []
    [answer] = engine.tell(REQUEST)
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "abort"
    [state] = engine.tell(attach(REQUEST))
    assert isinstance(state, RequestState), "who comes back another way is served"


def test_a_request_that_comes_twice_is_one() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    engine.step(2)
    assert engine.tell(REQUEST) == []
    [state] = engine.owed()
    assert state.choices[0].output.tolist() == expected(5, 2)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_requests_of_a_lost_gateway_end_unless_another_delivers_them() -> None:
    engine = Engine()
    moved = submit("moved", range(3), max_tokens=9)
    engine.tell(REQUEST)
    engine.tell(moved)
    engine.tell(attach(moved))
    [answer] = engine.tell(GatewayLost("gateway"))
    assert isinstance(answer, RequestEnded)
    assert answer.request_id == "r"
    engine.run()
    assert engine.outputs("moved") == {0: expected(3, 9)}


def test_a_beam_search_has_nothing_to_rewind() -> None:
    params = BeamParams(3, 1.0, EarlyStopping.ESTIMATED)
    request = submit("r", range(5), num_choices=3, max_tokens=8, beams=params)
    engine = Engine()
    engine.tell(request)
    engine.step(2)
    engine.tell(attach(request))
    [state] = engine.owed()
    assert state.submit.attachment == "second"
    engine.run()
    ended = [message for message in engine.log if isinstance(message, BeamsEnded)]
    assert len(ended) == 1
    for attachment in ("second", "third", "second.1"):  # the last was taken over, and learns of it
        state, again = engine.tell(attach(request, knows=False, attachment=attachment))
        assert isinstance(state, RequestState)
        assert again == ended[0]
    assert state.submit.attachment == "third"


# ------------------------------------------------------------------- admission


def test_a_request_that_comes_late_behind_an_abort_of_it_may_still_be_refused() -> None:
    engine = Engine(max_waiting_requests=1)
    engine.tell(submit("a", range(5)))
    engine.tell(Abort("b", "another", "gone"))
    [answer] = engine.tell(submit("b", range(5)))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "overloaded"


def test_more_than_may_wait_is_refused_with_the_numbers() -> None:
    engine = Engine(max_waiting_requests=2)
    for name in ("a", "b"):
        assert isinstance(engine.tell(submit(name, range(5)))[0], RequestState)
    [answer] = engine.tell(submit("c", range(5)))
    assert isinstance(answer, RequestEnded)
    assert (answer.reason, answer.error) == ("overloaded", "3 requests would wait, at most 2 may")
    request = submit("c", range(5))
    new = Attach("c", "other", "second", request, (), exact=False, is_new=True)
    [answer] = engine.tell(new)
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "overloaded"
    assert isinstance(engine.tell(attach(request))[0], RequestState), "it was accepted once"
    engine.tell(Abort("c", "second", "gone"))
    engine.tell(Abort("d", "second", "gone"))
    engine.step()  # both are admitted
    assert isinstance(engine.tell(submit("e", range(5)))[0], RequestState)


def test_each_tenant_has_its_own_share_of_the_queue() -> None:
    engine = Engine(max_tenant_tokens=10)

    def of(tenant: str, name: str) -> Submit:
        request = submit(name, range(6))
        object.__setattr__(request, "tenant", tenant)
        return request

    assert isinstance(engine.tell(of("x", "a"))[0], RequestState)
    [answer] = engine.tell(of("x", "b"))
    assert isinstance(answer, RequestEnded)
    assert answer.error == "12 tokens with your key would wait, at most 10 may"
    assert isinstance(engine.tell(of("y", "c"))[0], RequestState)
    engine.tell(Abort("a", "attachment", "gone"))
    assert isinstance(engine.tell(of("x", "b"))[0], RequestState)


def test_a_deadline_ends_a_request_and_frees_its_blocks() -> None:
    engine = Engine()
    request = submit("r", range(5), num_choices=2, max_tokens=12)
    object.__setattr__(request, "deadline_ms", 5_000)
    engine.tell(request)
    engine.step(3)
    engine.tell(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=5_999)  # the epoch began at 1,000
    assert engine.core.pool.num_used > 0
    engine.tell(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=6_000)
    ended = engine.log[-1]
    assert isinstance(ended, RequestEnded)
    assert (ended.reason, ended.error) == ("deadline", "its deadline has passed")
    assert engine.core.pool.num_used == 0
    assert engine.outputs("r") == {0: expected(5, 5), 1: expected(5, 5)}


def test_who_waits_too_long_is_sent_away_but_not_who_was_served() -> None:
    engine = Engine(num_blocks=8, queue_ttl_ms=1_000)
    engine.tell(submit("served", range(5), max_tokens=25))
    engine.step(2)
    engine.tell(submit("waits", range(5), max_tokens=20))
    engine.plan(now_ms=1_999)  # the epoch began at 1,000
    result = engine.worker.execute(engine.plans.popleft())
    engine.tell(result)
    engine.plan(now_ms=2_000)
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert [(found.request_id, found.reason) for found in ended] == [("waits", "deadline")]
    engine.run()
    assert engine.outputs("served") == {0: expected(5, 25)}


@pytest.mark.parametrize("skew_ms", [-3_600_000, 0, 3_600_000])
def test_times_of_gateways_whose_clocks_are_wrong_hold_by_the_engines_clock(skew_ms: int) -> None:
    """Also across epochs: they are not given anew."""
    engine = Engine(queue_ttl_ms=2_000, num_blocks=8)
    slow = submit("slow", range(5), received_ms=5_000_000 + skew_ms, max_tokens=25)
    object.__setattr__(slow, "deadline_ms", slow.received_ms + 5_000)
    engine.tell(slow)
    engine.step(1)
    engine.tell(submit("waits", range(100, 125), received_ms=5_000_000 + skew_ms, max_tokens=5))
    engine.start_epoch()  # at 2,000; both were accepted at 1,000
    for now_ms, over in ((2_999, []), (3_000, ["waits"]), (5_999, ["waits"])):
        engine.plan(now_ms=now_ms)
        assert _over_deadline(engine) == over, f"at {now_ms}"
        engine.tell(engine.worker.execute(engine.plans.popleft()))
    engine.plan(now_ms=6_000)
    assert _over_deadline(engine) == ["waits", "slow"]


def _over_deadline(engine: Engine) -> list[str]:
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert {found.reason for found in ended} <= {"deadline"}
    return [found.request_id for found in ended]


def test_requests_are_recovered_in_the_order_of_their_acceptance_whatever_gateways_clocks_say() -> (
    None
):
    engine = Engine()
    received_ms = {"a": 9_000, "b": 1, "c": 5_000, "d": 0}
    for name, at_ms in received_ms.items():
        engine.tell(submit(name, range(5), received_ms=at_ms))
    for _ in range(2):
        engine.start_epoch()
        assert list(engine.core._known.by_request) == list("abcd")
    engine.tell(submit("e", range(5), received_ms=0))
    engine.start_epoch()
    assert list(engine.core._known.by_request) == list("abcde")


def test_who_was_served_before_a_new_epoch_has_had_its_turn() -> None:
    engine = Engine(queue_ttl_ms=1_000)
    engine.tell(submit("served", range(5), max_tokens=12))
    engine.step(2)
    engine.tell(submit("waits", range(5), max_tokens=12))
    engine.start_epoch()
    engine.plan(now_ms=1_000)
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert [(found.request_id, found.reason) for found in ended] == [("waits", "deadline")]
    engine.run()
    assert engine.outputs("served") == {0: expected(5, 12)}


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("is_suspect", [True, False])
def test_who_was_only_prefilling_before_a_new_epoch_has_had_its_turn(
    num_epochs: int, is_suspect: bool
) -> None:
    engine = Engine(queue_ttl_ms=1_000)
    [state] = engine.tell(submit("served", range(130), max_tokens=3))
    assert isinstance(state, RequestState)
    engine.plan()
    if not is_suspect:
        engine.tell(engine.worker.execute(engine.plans.popleft()))
    engine.start_epoch([state.choices[0].handle] if is_suspect else [])
    for _ in range(num_epochs - 1):
        engine.start_epoch()
    engine.plan(now_ms=10_000)
    assert not [message for message in engine.log if isinstance(message, RequestEnded)]
    engine.run()
    assert engine.outputs("served") == {0: expected(130, 3)}


def test_who_has_waited_too_long_when_its_deadline_passes_ends_once() -> None:
    engine = Engine(queue_ttl_ms=1_000)
    now_ms = 1_000  # when the epoch began
    beams = BeamParams(2, 1.0, EarlyStopping.NEVER)
    for name, request in (
        ("beams", submit("beams", range(5), num_choices=2, max_tokens=4, beams=beams)),
        ("choices", submit("choices", range(5), num_choices=2, max_tokens=4)),
    ):
        object.__setattr__(request, "deadline_ms", 900)
        engine.tell(request)
        now_ms += 1_000
        engine.plan(now_ms)
        ended = [message for message in engine.log if isinstance(message, RequestEnded)]
        assert [found.request_id for found in ended].count(name) == 1
    assert not engine.core.num_requests


# ----------------------------------------------------- deadly requests, leaving


def test_who_kills_workers_is_isolated_and_then_failed() -> None:
    engine = Engine()
    names = ("a", "b", "deadly")
    for name in names:
        engine.tell(submit(name, range(5), max_tokens=12))
    engine.step(2)
    assert len(engine.core.suspects()) == 3
    engine.start_epoch(engine.core.suspects())
    # Once more all together, and it happens again.
    engine.plan()
    assert len(engine.plans[0].admissions) == 3
    engine.start_epoch(engine.core.suspects())
    # Now one by one: as soon as one has got further, the next may try.
    tried: list[int] = []
    while "deadly" not in (name for name in _running(engine)):
        tried.append(len(_running(engine)))
        engine.step()
    assert max(tried) <= 2
    assert len(engine.plans[0].chunk_handles) == 1
    for _ in range(2):  # the second time is no coincidence
        assert not any(isinstance(message, RequestEnded) for message in engine.log)
        engine.start_epoch(engine.core.suspects())
        engine.plan()
        assert _running(engine)[:1] in (["deadly"], ["a"], ["b"], [])
    ended = [message for message in engine.log if isinstance(message, RequestEnded)]
    assert [found.request_id for found in ended] == ["deadly"]
    assert ended[0].error == "4 workers in a row have died computing this request"
    engine.run()
    assert engine.outputs("a") == engine.outputs("b") == {0: expected(5, 12)}


def _running(engine: Engine) -> list[str]:
    return [group.request_id for group in engine.core._planner.queues.running]


def test_who_gets_further_is_no_suspect_any_more() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    for _ in range(5):  # a worker that is killed again and again, but not by the request
        engine.step(2)
        engine.start_epoch(engine.core.suspects())
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_an_idle_worker_that_dies_makes_nobody_suspect() -> None:
    engine = Engine()
    engine.tell(REQUEST)
    assert engine.core.suspects() == []


def test_a_scheduler_that_leaves_finishes_what_runs_and_admits_nobody() -> None:
    engine = Engine()
    engine.tell(submit("runs", range(5), max_tokens=12))
    engine.step(2)
    engine.tell(Drain(epoch=1))  # of another one, long ago
    engine.tell(submit("waits", range(5), max_tokens=12))
    engine.tell(Drain(engine.epoch))
    engine.run()
    assert not engine.core.has_running
    assert engine.outputs("runs") == {0: expected(5, 12)}
    assert engine.core.num_requests == 1
    engine.start_epoch()
    engine.run()
    assert engine.outputs("waits") == {0: expected(5, 12)}


def test_an_abort_is_remembered_by_the_clock_of_the_log() -> None:
    """Nothing may have been planned for a long time."""
    core = Engine(resume_window_ms=60_000).core
    core.schedule(5_000)
    core.apply(Abort("early", "attachment", "gone"), EntryId(900_000, 0))
    core.apply(Abort("late", "attachment", "gone"), EntryId(900_000, 1))
    core.schedule(900_001)
    [answer] = core.apply(submit("early", [1, 2, 3]), EntryId(959_999, 0))
    assert isinstance(answer, RequestEnded)
    [answer] = core.apply(submit("late", [1, 2, 3]), EntryId(960_000, 0))
    assert isinstance(answer, RequestState)


def test_what_has_ended_is_not_kept_for_what_it_could_have_become() -> None:
    engine = Engine()
    engine.tell(submit("long", [1, 2, 3], max_tokens=150))
    engine.step()
    calendar = engine.core._planner._reaches_limit
    assert len(calendar) == 1
    engine.tell(Abort("long", "attachment", "gone"))
    assert len(calendar) == 0
    for number in range(5_000):
        engine.tell(submit(f"waits{number}", [1, 2, 3]))
        engine.tell(Abort(f"waits{number}", "attachment", "gone"))
    assert len(engine.core._planner.queues._waiting) <= 1_024
