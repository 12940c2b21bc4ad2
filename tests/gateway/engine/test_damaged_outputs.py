"""No entry of the outputs log, whatever is in it, stops a gateway from reading the next epoch."""

import random

from gateway.engine.events import Event, TokensArrived
from gateway.engine.outputs_follower import OutputsFollower
from shared.bus.api import Entry, EntryId
from shared.codec import Message, encode
from shared.messages.plans import EpochStarted
from shared.messages.requests import Submit
from tests.scheduler_svc.core.test_damaged_logs import Engine, damaged, some_requests
from tests.scheduler_svc.test_recovery import result, state


def test_any_damaged_entry_is_read_and_the_next_epoch_is_followed() -> None:
    engine = Engine()
    requests = some_requests()
    engine.give(*requests)
    for _ in range(12):
        engine.turn()
    log: list[Message] = [EpochStarted(5, "scheduler", ("worker",)), *engine.outputs]
    rng, num_damaged = random.Random(1), 0
    for _ in range(300):
        where = rng.randrange(len(log))
        bad = damaged(log[where], rng)
        if bad is None:
            continue
        num_damaged += 1
        follower = OutputsFollower()
        for request in requests:
            if isinstance(request, Submit):
                is_search = request.sampling.beams is not None
                follower.requests.open(
                    request.request_id, request.attachment, request.num_choices, False, is_search
                )
        for seq, message in enumerate((*log[:where], bad, *log[where + 1 :])):
            follower.apply(Entry(EntryId(5, seq), (encode(message),)))
        follower.requests.open("new", "attachment")
        events: list[Event] = []
        for seq, message in enumerate(
            (EpochStarted(6, "s", ("w",)), state("new", 1, []), result(1, {1: 7}))
        ):
            events += follower.apply(Entry(EntryId(6, seq), (encode(message),)))
        assert TokensArrived("new", 0, [7], ()) in events
    assert num_damaged > 150
