"""Requests are accepted, refused, recovered, and run alone after deaths of workers."""

from shared.messages.outputs import RequestEnded, RequestState
from shared.messages.requests import Abort, Attach, Drain, Submit
from tests.support.logged_core import REQUEST, LoggedCore, attach, expected
from tests.support.requests import submit


def test_a_request_that_is_submitted_twice_runs_once() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    engine.step(2)
    assert engine.apply(REQUEST) == []
    [state] = engine.checkpoint()
    assert state.choices[0].output.tolist() == expected(5, 2)
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_a_request_that_comes_after_its_abort_may_still_be_refused() -> None:
    engine = LoggedCore(max_waiting_requests=1)
    engine.apply(submit("a", range(5)))
    engine.apply(Abort("b", "another", "gone"))
    [answer] = engine.apply(submit("b", range(5)))
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "overloaded"


def test_requests_beyond_the_limit_of_the_queue_are_refused_with_the_numbers() -> None:
    engine = LoggedCore(max_waiting_requests=2)
    for name in ("a", "b"):
        assert isinstance(engine.apply(submit(name, range(5)))[0], RequestState)
    [answer] = engine.apply(submit("c", range(5)))
    assert isinstance(answer, RequestEnded)
    assert (answer.reason, answer.error) == ("overloaded", "3 requests would wait, at most 2 may")
    request = submit("c", range(5))
    new = Attach("c", "other", "second", request, (), exact=False, is_new=True)
    [answer] = engine.apply(new)
    assert isinstance(answer, RequestEnded)
    assert answer.reason == "overloaded"
    assert isinstance(engine.apply(attach(request))[0], RequestState), "it was accepted once"
    engine.apply(Abort("c", "second", "gone"))
    engine.apply(Abort("d", "second", "gone"))
    engine.step()  # both are admitted
    assert isinstance(engine.apply(submit("e", range(5)))[0], RequestState)


def test_each_tenant_has_its_own_share_of_the_queue() -> None:
    engine = LoggedCore(max_tenant_tokens=10)

    def of(tenant: str, name: str) -> Submit:
        request = submit(name, range(6))
        object.__setattr__(request, "tenant", tenant)
        return request

    assert isinstance(engine.apply(of("x", "a"))[0], RequestState)
    [answer] = engine.apply(of("x", "b"))
    assert isinstance(answer, RequestEnded)
    assert answer.error == "12 tokens with your key would wait, at most 10 may"
    assert isinstance(engine.apply(of("y", "c"))[0], RequestState)
    engine.apply(Abort("a", "attachment", "gone"))
    assert isinstance(engine.apply(of("x", "b"))[0], RequestState)


def test_requests_are_recovered_in_the_order_of_their_acceptance() -> None:
    engine = LoggedCore()
    received_ms = {"a": 9_000, "b": 1, "c": 5_000, "d": 0}
    for name, at_ms in received_ms.items():
        engine.apply(submit(name, range(5), received_ms=at_ms))
    for _ in range(2):
        engine.start_epoch()
        assert list(engine.core._known.by_request) == list("abcd")
    engine.apply(submit("e", range(5), received_ms=0))
    engine.start_epoch()
    assert list(engine.core._known.by_request) == list("abcde")


def test_a_request_whose_workers_die_runs_alone_and_then_fails() -> None:
    engine = LoggedCore()
    names = ("a", "b", "deadly")
    for name in names:
        engine.apply(submit(name, range(5), max_tokens=12))
    engine.step(2)
    assert len(engine.core.suspects()) == 3
    engine.start_epoch(engine.core.suspects())
    # They run together again, and the next worker dies.
    engine.plan()
    assert len(engine.plans[0].admissions) == 3
    engine.start_epoch(engine.core.suspects())
    # Now each runs alone until it gets further.
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


def _running(engine: LoggedCore) -> list[str]:
    return [group.request_id for group in engine.core._planner.queues.running]


def test_a_request_that_gets_further_is_no_suspect_any_more() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    for _ in range(5):  # the workers die of another cause
        engine.step(2)
        engine.start_epoch(engine.core.suspects())
    engine.run()
    assert engine.outputs("r") == {0: expected(5, 12)}


def test_the_death_of_an_idle_worker_makes_no_request_suspect() -> None:
    engine = LoggedCore()
    engine.apply(REQUEST)
    assert engine.core.suspects() == []


def test_a_draining_scheduler_finishes_running_requests_and_admits_no_others() -> None:
    engine = LoggedCore()
    engine.apply(submit("runs", range(5), max_tokens=12))
    engine.step(2)
    engine.apply(Drain(epoch=1))  # of an earlier epoch
    engine.apply(submit("waits", range(5), max_tokens=12))
    engine.apply(Drain(engine.epoch))
    engine.run()
    assert not engine.core.has_running
    assert engine.outputs("runs") == {0: expected(5, 12)}
    assert engine.core.num_requests == 1
    engine.start_epoch()
    engine.run()
    assert engine.outputs("waits") == {0: expected(5, 12)}
