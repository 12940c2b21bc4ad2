"""Who waits for which request, without any I/O."""

from dataclasses import replace

import numpy as np

from gateway.engine.deliveries import Deliveries
from gateway.engine.event_queue import EventQueue
from gateway.engine.events import EngineUnreachable, RequestAccepted, RequestFailed
from gateway.engine.outputs_follower import OutputsFollower
from shared.bus.api import Entry, EntryId
from shared.codec import Message, encode
from shared.messages.outputs import ChoiceState, RequestEnded, RequestState
from shared.messages.plans import EpochStarted
from shared.messages.requests import Attach
from tests.support.requests import submit


async def test_an_entry_behind_a_gap_that_ends_a_request_leaves_nothing_to_attach_to() -> None:
    follower, sent, queue = OutputsFollower(), list[Attach](), EventQueue()
    deliveries = Deliveries("gateway", follower.requests, sent.append, lambda: 0.0)
    deliveries.open(submit("ended"), queue)
    deliveries.open(submit("runs"), queue)
    ended = encode(RequestEnded("ended", "overloaded", "too much waits", "1-1"))
    deliveries.dispatch(follower.apply(Entry(EntryId(5, 7), (ended,))))
    assert [attach.request_id for attach in sent] == ["runs"]
    [failed] = await queue.take()
    assert isinstance(failed, RequestFailed)
    assert failed.overloaded


async def test_a_refusal_that_is_read_before_the_append_is_known_to_have_failed_stands() -> None:
    follower, sent, queue = OutputsFollower(), list[Attach](), EventQueue()
    deliveries = Deliveries("gateway", follower.requests, sent.append, lambda: 0.0)
    deliveries.open(submit("refused"), queue)
    deliveries.open(submit("lost"), queue)
    ended = encode(RequestEnded("refused", "overloaded", "too much waits", "1-1"))
    deliveries.dispatch(follower.apply(Entry(EntryId(5, 0), (ended,))))
    deliveries.attach_unanswered("refused", queue)
    deliveries.attach_unanswered("lost", queue)
    assert [attach.request_id for attach in sent] == ["lost"]
    [failed] = await queue.take()
    assert isinstance(failed, RequestFailed)


def test_every_attachment_of_a_delivery_is_named_after_it() -> None:
    sent = list[Attach]()
    deliveries = Deliveries("gateway", OutputsFollower().requests, sent.append, lambda: 0.0)
    deliveries.open(replace(submit("a"), attachment="first", overtaken=("other",)), EventQueue())
    deliveries.attach("a")
    deliveries.attach("a")
    assert [attach.attachment for attach in sent] == ["first.1", "first.2"]
    assert all(attach.submit and attach.submit.overtaken == ("other",) for attach in sent)


def said(deliveries: Deliveries, follower: OutputsFollower, at: EntryId, message: Message) -> None:
    deliveries.dispatch(follower.apply(Entry(at, (encode(message),))))


def test_only_an_engine_that_lacks_a_prompt_gets_it_again() -> None:
    now, follower, sent = [0.0], OutputsFollower(), list[Attach]()
    deliveries = Deliveries("gateway", follower.requests, sent.append, lambda: now[0])
    asked = submit("a", range(9))
    deliveries.open(asked, EventQueue())
    deliveries.attach("a")  # it is unknown whether it was submitted
    for now[0] in (2.0, 100.0):
        deliveries.repeat()
    said(deliveries, follower, EntryId(5, 0), EpochStarted(5, "scheduler", ("worker",)))
    unknown = RequestEnded("a", "unknown", "", "1-1")
    said(deliveries, follower, EntryId(5, 1), unknown)
    now[0] = 200.0
    deliveries.repeat()
    assert [len(attach.submit.prompt) for attach in sent if attach.submit] == [9, 0, 0, 9, 0]
    assert sent[3] == sent[0]
    assert len({(attach.attachment, attach.is_new) for attach in sent}) == 1
    known = replace(asked, attachment=sent[-1].attachment)
    state = RequestState(known, (ChoiceState(0, 1, np.empty(0, np.int32), ""),), "1-1")
    said(deliveries, follower, EntryId(5, 2), state)
    sent.clear()
    said(deliveries, follower, EntryId(5, 4), RequestEnded("b", "stop", "", "1-1"))  # a gap
    said(deliveries, follower, EntryId(5, 5), unknown)
    assert [len(attach.submit.prompt) for attach in sent if attach.submit] == [0, 9]
    said(deliveries, follower, EntryId(5, 6), replace(state, submit=known))
    assert len(sent) == 2


def test_a_state_without_the_prompt_is_no_answer_to_a_look_up() -> None:
    follower, sent, queue = OutputsFollower(), list[Attach](), EventQueue()
    deliveries = Deliveries("gateway", follower.requests, sent.append, lambda: 0.0)
    deliveries.look_up("a", queue, patience_s=9.0)
    known = replace(submit("a", range(9)), attachment=sent[0].attachment)
    state = RequestState(known, (ChoiceState(0, 1, np.empty(0, np.int32), ""),), "1-1")
    said(deliveries, follower, EntryId(5, 0), EpochStarted(5, "scheduler", ("worker",)))
    bare = replace(state, submit=known.without_prompt())
    said(deliveries, follower, EntryId(5, 1), bare)
    assert follower.requests.awaits("a")
    said(deliveries, follower, EntryId(5, 2), state)
    assert not follower.requests.awaits("a")


async def test_a_request_without_entries_in_the_log_is_attached_to() -> None:
    now, follower, sent = [0.0], OutputsFollower(), list[Attach]()
    deliveries = Deliveries("gateway", follower.requests, sent.append, lambda: now[0])
    deliveries.open(submit("trimmed"), EventQueue())
    deliveries.attach_where_states_lack()
    now[0] = 9.9
    deliveries.attach_where_states_lack()
    assert sent == []
    now[0] = 10.0
    deliveries.attach_where_states_lack()
    deliveries.attach_where_states_lack()
    assert [(attach.request_id, attach.is_new) for attach in sent] == [("trimmed", True)]


async def test_patience_limits_the_wait_for_a_first_answer_not_for_accepted_requests() -> None:
    now, follower, queues = [0.0], OutputsFollower(), (EventQueue(), EventQueue())
    deliveries = Deliveries("gateway", follower.requests, list[Attach]().append, lambda: now[0])
    unanswered, accepted = submit("unanswered"), submit("accepted")
    for each, queue in zip((unanswered, accepted), queues, strict=True):
        deliveries.open(each, queue, patience_s=1.0)
    state = RequestState(accepted, (ChoiceState(0, 1, np.empty(0, np.int32), ""),), "1-1")
    started = EpochStarted(5, "scheduler", ("worker",))
    for seq, message in enumerate((started, state)):
        deliveries.dispatch(follower.apply(Entry(EntryId(5, seq), (encode(message),))))
    # The next epoch has no state of it yet, so the gateway has to attach.
    started = EpochStarted(6, "scheduler", ("worker",))
    deliveries.dispatch(follower.apply(Entry(EntryId(6, 0), (encode(started),))))
    deliveries.give_up("silent")
    now[0] = 1.0
    deliveries.give_up("silent")
    deliveries.attach_where_states_lack()
    now[0] = 1_000.0
    deliveries.attach_where_states_lack()
    deliveries.give_up("silent")
    assert await queues[0].take() == [EngineUnreachable("unanswered", "silent")]
    assert await queues[1].take() == [RequestAccepted("accepted")]


def test_an_engine_is_full_for_a_moment_after_a_refusal_that_is_for_all() -> None:
    now, follower = [0.0], OutputsFollower()
    deliveries = Deliveries("gateway", follower.requests, list[Attach]().append, lambda: now[0])
    for seq, for_all in enumerate((False, True)):
        deliveries.open(submit("a"), EventQueue())
        ended = RequestEnded("a", "overloaded", "too much waits", "1-1", for_all)
        deliveries.dispatch(follower.apply(Entry(EntryId(5, seq), (encode(ended),))))
        assert deliveries.is_full == for_all
    now[0] = 0.2
    assert not deliveries.is_full
