"""A client's view wins, whatever the log has of its request."""

import pytest

from shared.messages.outputs import BeamsEnded, RequestEnded, RequestState
from shared.messages.requests import Stop
from shared.sampling import BeamParams, EarlyStopping
from tests.support.logged_core import REQUEST, LoggedCore, attach, expected, view
from tests.support.requests import submit


@pytest.mark.parametrize("num_seen", [0, 2, 3])
def test_a_client_that_has_less_than_the_log_gets_the_rest(num_seen: int) -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(3)
    assert engine.apply(attach(REQUEST, view(*expected(5, num_seen)))) == []
    [state] = engine.checkpoint()
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
def test_a_client_that_differs_from_the_log_gets_more_of_its_own_tokens(
    tokens: list[int], num_steps: int
) -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(num_steps)
    [state] = engine.apply(attach(REQUEST, view(*tokens)))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == tokens
    engine.run()
    rest = expected(5 + len(tokens), 12 - len(tokens))
    assert engine.outputs("r") == {0: tokens + rest}
    assert engine.core.pool.num_used == 0


def test_an_exact_attach_continues_exactly_the_clients_tokens() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(4)
    [state] = engine.apply(attach(REQUEST, view(*expected(5, 2)), exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 2)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_a_client_without_tokens_may_have_all_of_them_generated_again() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(4)
    [state] = engine.apply(attach(REQUEST, exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == []
    engine.run()
    [state] = engine.apply(attach(REQUEST, view(*expected(5, 3)), exact=True))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 3)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_a_request_that_the_log_has_lost_continues_from_the_view() -> None:
    engine = LoggedCore()
    [state] = engine.apply(attach(REQUEST, view(7, 8)))
    assert isinstance(state, RequestState)
    engine.run()
    assert engine.outputs("r") == {0: [7, 8, *expected(7, 10)]}


def test_a_request_that_is_neither_remembered_nor_sent_is_unknown() -> None:
    [answer] = LoggedCore().apply(attach(REQUEST, has_submit=False))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "unknown"


@pytest.mark.parametrize("dies", [False, True])
def test_an_ended_request_is_remembered_for_a_while(dies: bool) -> None:
    engine = LoggedCore(resume_window_ms=5_000)
    engine.apply(REQUEST)
    engine.run()
    if dies:
        engine.start_epoch()
    [state] = engine.apply(attach(REQUEST, has_submit=False))
    assert isinstance(state, RequestState)
    [choice] = state.choices
    assert (choice.output.tolist(), choice.finish_reason) == (expected(5, 12), "length")
    engine.plan(now_ms=engine.epoch + 4_999)
    assert isinstance(engine.apply(attach(REQUEST, has_submit=False))[0], RequestState)
    engine.plan(now_ms=engine.epoch + 5_001)
    assert isinstance(engine.apply(attach(REQUEST, has_submit=False))[0], RequestEnded)


def test_views_of_another_number_of_choices_are_ignored() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(3)
    assert engine.apply(attach(REQUEST, view(1), view(2))) == []
    engine.run()
    [state] = engine.apply(attach(REQUEST, view(1), view(2), view(3)))
    assert isinstance(state, RequestState)
    assert state.choices[0].output.tolist() == expected(5, 12)


def test_a_client_that_has_seen_every_end_gets_them_again() -> None:
    engine = LoggedCore()
    seen = view(7, 8, finish_reason="stop")
    for has_submit in (True, False):
        [state] = engine.apply(attach(REQUEST, seen, has_submit=has_submit))
        assert isinstance(state, RequestState)
        assert state.choices[0].output.tolist() == [7, 8]


def test_a_client_that_differs_from_an_ended_request_gets_more_of_its_own_tokens() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.run()
    [state] = engine.apply(attach(REQUEST, view(1, 2, 3)))
    assert isinstance(state, RequestState)
    engine.run()
    assert engine.outputs("r") == {0: [1, 2, 3, *expected(8, 9)]}


def test_several_choices_are_rewound_together() -> None:
    request = submit("r", range(5), num_choices=3, max_tokens=12)
    engine = LoggedCore()
    engine.apply(request)
    engine.step(4)
    engine.apply(Stop("r", 1, 2))
    views = (view(1, 2, 3), view(9, 9, finish_reason="stop"), view(4, 5, 6))
    [state] = engine.apply(attach(request, *views))
    assert isinstance(state, RequestState)
    engine.run()
    rest = expected(8, 9)
    assert engine.outputs("r") == {0: [1, 2, 3, *rest], 1: [9, 9], 2: [4, 5, 6, *rest]}
    assert engine.core.pool.num_used == 0


def test_views_of_different_lengths_that_differ_from_the_log_end_with_an_error() -> None:
    request = submit("r", range(5), num_choices=2, max_tokens=12)
    engine = LoggedCore()
    engine.apply(request)
    engine.step(4)
    [answer] = engine.apply(attach(request, view(1, 2, 3), view(4)))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "error"
    engine.run()
    assert engine.core.pool.num_used == 0


def test_a_view_that_has_reached_the_limit_has_ended() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(2)
    [state] = engine.apply(attach(REQUEST, view(*range(12))))
    assert isinstance(state, RequestState)
    assert state.choices[0].finish_reason == "length"
    assert not engine.core.has_running


def test_a_preempted_request_is_rewound_as_any_other() -> None:
    for host in (0, 40):
        engine = LoggedCore(num_blocks=8, num_host_blocks=host)
        other = submit("first", range(50, 59), max_tokens=20)
        engine.apply(other)
        engine.apply(REQUEST)
        engine.step(11)
        assert engine.core.stats().num_waiting == 1, "the pool was meant to be too small"
        engine.apply(attach(REQUEST, view(1, 2)))
        engine.run()
        assert engine.outputs("r") == {0: [1, 2, *expected(7, 10)]}
        assert engine.outputs("first") == {0: expected(9, 20)}
        assert engine.core.pool.num_used == engine.core.host_pool.num_used == 0


def test_a_beam_search_is_not_rewound() -> None:
    params = BeamParams(3, 1.0, EarlyStopping.ESTIMATED)
    request = submit("r", range(5), num_choices=3, max_tokens=8, beams=params)
    engine = LoggedCore()
    engine.apply(request)
    engine.step(2)
    engine.apply(attach(request))
    [state] = engine.checkpoint()
    assert state.submit.attachment == "second"
    engine.run()
    ended = [message for message in engine.log if isinstance(message, BeamsEnded)]
    assert len(ended) == 1
    for attachment in ("second", "third", "second.1"):  # the last one is overtaken
        state, again = engine.apply(attach(request, has_submit=False, attachment=attachment))
        assert isinstance(state, RequestState)
        assert again == ended[0]
    assert state.submit.attachment == "third"
