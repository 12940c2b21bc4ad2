"""Which gateway delivers a request, and which of them gets the prompt."""

import pytest

from shared.messages.outputs import RequestEnded, RequestState
from shared.messages.requests import Abort, Attach
from tests.support.logged_core import REQUEST, LoggedCore, attach, expected, view, without_prompt
from tests.support.requests import submit


def test_an_overtaken_delivery_is_remembered_once() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    first = REQUEST.attachment
    for attachment, overtaken in (
        ("second", (first,)),
        ("second", (first,)),
        ("third", (first, "second")),
        ("third.1", (first, "second")),
        ("third", (first, "second")),  # an Attach may be repeated late
    ):
        engine.apply(attach(REQUEST, has_submit=False, attachment=attachment))
        [state] = engine.checkpoint()
        assert (state.submit.attachment, state.submit.overtaken) == (attachment, overtaken)


def taken_over_twice() -> LoggedCore:
    """A core with three tokens of REQUEST, which a third delivery has overtaken from the second."""
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(3)
    for attachment in ("second", "third"):
        engine.apply(attach(REQUEST, has_submit=False, attachment=attachment))
    return engine


def stale(attachment: str) -> Attach:
    """An Attach of an overtaken delivery that wants log-probabilities."""
    return attach(REQUEST, view(*expected(5, 1)), attachment=attachment, exact=True)


@pytest.mark.parametrize("attachment", [f"{REQUEST.attachment}.1", "second", "second.7"])
@pytest.mark.parametrize("restarts", [False, True])
def test_an_overtaken_delivery_does_not_take_its_request_back(
    restarts: bool, attachment: str
) -> None:
    engine = taken_over_twice()
    engine.checkpoint()
    if restarts:
        engine.start_epoch()
    assert engine.apply(stale(attachment)) == []
    [state] = engine.checkpoint()  # the answer to the overtaken one
    assert (state.submit.attachment, state.submit.overtaken[-1]) == ("third", "second")
    assert state.choices[0].output.tolist() == expected(5, 3)


def test_an_overtaken_delivery_does_not_restart_an_ended_request() -> None:
    engine = taken_over_twice()
    engine.run()
    [state] = engine.apply(stale("second.1"))
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third"
    assert state.choices[0].finish_reason == "length"


def test_a_delivery_overtaken_after_the_end_does_not_restart_the_request() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.run()
    for attachment in ("second", "third"):
        [state] = engine.apply(attach(REQUEST, view(*expected(5, 2)), attachment=attachment))
    [state] = engine.apply(stale("second.1"))
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third"


def test_an_overtaken_delivery_gets_a_request_back_that_the_other_aborted() -> None:
    engine = taken_over_twice()
    engine.apply(Abort("r", "third", "its client left"))
    [state] = engine.apply(stale("second.1"))
    assert isinstance(state, RequestState)
    assert (state.submit.attachment, state.submit.overtaken[-1]) == ("second.1", "third")
    assert "second" not in state.submit.overtaken


def test_a_delivery_that_restarts_an_ended_request_overtakes_the_earlier_one() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.run()
    [state] = engine.apply(attach(REQUEST, view(), attachment="second", exact=True))
    assert isinstance(state, RequestState)
    assert state.submit.overtaken == (REQUEST.attachment,)
    assert engine.apply(stale(f"{REQUEST.attachment}.1")) == []
    [state] = engine.checkpoint()
    assert state.submit.attachment == "second"


def test_overtaken_deliveries_that_only_the_client_has_are_remembered_again() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    message = attach(REQUEST, view(100), attachment="third.1", overtaken=("second",))
    [state] = engine.apply(message)
    assert isinstance(state, RequestState)
    assert state.submit.attachment == "third.1"
    assert set(state.submit.overtaken) == {REQUEST.attachment, "second"}


def test_the_latest_32_overtaken_deliveries_are_remembered() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    for number in range(100):
        engine.apply(attach(REQUEST, has_submit=False, attachment=f"delivery {number}"))
    [state] = engine.checkpoint()
    assert state.submit.overtaken == tuple(f"delivery {number}" for number in range(67, 99))


@pytest.mark.parametrize("is_rewound", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_prompt_that_the_log_has_is_not_written_again(dies: bool, is_rewound: bool) -> None:
    engine = LoggedCore()
    for state in engine.apply(REQUEST):
        engine.apply(state)
    engine.step(3)
    view_of_client = (
        view(7) if is_rewound else view(*expected(5, 2))
    )  # another history, or the log's
    [state] = [
        *engine.apply(without_prompt(attach(REQUEST, view_of_client))),
        *engine.checkpoint(),
    ]
    assert isinstance(state, RequestState)
    assert (state.submit.prompt.tolist(), state.submit.attachment) == ([], "second")
    if dies:
        engine.start_epoch()
        assert isinstance(engine.log[-1], RequestState)
        assert engine.log[-1].submit.prompt.tolist() == REQUEST.prompt.tolist()
    engine.run()
    assert len(engine.outputs("r")[0]) == 12


def test_a_gateway_that_has_only_an_id_gets_the_prompt() -> None:
    engine = LoggedCore()
    for state in engine.apply(REQUEST):
        engine.apply(state)
    engine.step(2)
    engine.apply(attach(REQUEST, has_submit=False))
    engine.apply(without_prompt(attach(REQUEST, attachment="third", overtaken=("second",))))
    [state] = engine.checkpoint()
    assert state.submit.prompt.tolist() == REQUEST.prompt.tolist()
    engine.run()
    [bare] = engine.apply(without_prompt(attach(REQUEST, attachment="fourth")))
    [whole] = engine.apply(attach(REQUEST, attachment="fifth", has_submit=False))
    assert isinstance(bare, RequestState)
    assert isinstance(whole, RequestState)
    assert (len(bare.submit.prompt), len(whole.submit.prompt)) == (0, 5)


def test_an_attach_without_the_prompt_needs_a_remembered_one() -> None:
    engine = LoggedCore()
    [answer] = engine.apply(without_prompt(attach(REQUEST, view(7, 8))))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"
    engine.apply(REQUEST)
    engine.run()
    other = attach(submit("r", range(6), max_tokens=12), view(7, 8))
    [answer] = engine.apply(without_prompt(other))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"
    [state] = engine.apply(without_prompt(attach(REQUEST, view(7, 8))))  # it continues
    assert isinstance(state, RequestState)
    assert len(state.submit.prompt) == 5
    engine.run()
    assert engine.outputs("r") == {0: [7, 8, *expected(7, 10)]}


def test_a_state_whose_prompt_the_log_has_lost_is_not_recovered() -> None:
    engine = LoggedCore()
    for state in engine.apply(REQUEST):
        engine.apply(state)
    engine.apply(without_prompt(attach(REQUEST)))
    [bare] = engine.checkpoint()
    engine.log = [engine.log[0], bare]
    engine.start_epoch()
    assert engine.core.num_requests == 0
    [answer] = engine.apply(without_prompt(attach(REQUEST, attachment="third")))
    assert isinstance(answer, RequestEnded)
    [state] = engine.apply(attach(REQUEST, attachment="third"))
    assert isinstance(state, RequestState)
    assert len(state.submit.prompt) == 5
