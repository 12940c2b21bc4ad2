"""An outputs log that is written entry by entry, and read at once by a gateway's follower."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gateway.engine.events import Desynchronized, Event, RequestAccepted, TokensArrived
from gateway.engine.outputs_follower import OutputsFollower
from shared.bus.api import Entry, EntryId
from shared.codec import Message, encode
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import ChoiceState, PromptLogprobs, RequestState, StepResult
from shared.messages.plans import EpochStarted
from tests.support.requests import submit

# Of all requests in tests.support.requests.
ATTACHMENT = "attachment"
AGAIN = f"{ATTACHMENT}.1"


class Log:
    """Writes entries and reads them at once; events of acceptance are kept apart."""

    def __init__(self, *requests: str, scored: bool = False) -> None:
        self.follower = OutputsFollower()
        self.accepted: list[str] = []
        self.start(1)
        for request_id in requests:
            self.follower.requests.open(request_id, ATTACHMENT, scored=scored)

    def append(self, *messages: Message) -> list[Event]:
        self.seq += 1
        data = tuple(encode(message) for message in messages)
        events = self.follower.apply(Entry(EntryId(self.epoch, self.seq), data))
        accepted = [event for event in events if isinstance(event, RequestAccepted)]
        self.accepted += [event.request_id for event in accepted]
        return [event for event in events if event not in accepted]

    def start(self, epoch: int) -> list[Event]:
        self.epoch, self.seq, self.number = epoch, -1, 0
        return self.append(EpochStarted(epoch, "scheduler", ("worker",)))

    def state(
        self,
        request_id: str,
        handle: int,
        output: Sequence[int] = (),
        reason: str = "",
        attachment: str = ATTACHMENT,
        overtaken: tuple[str, ...] = (),
    ) -> list[Event]:
        choice = ChoiceState(0, handle, np.array(output, np.int32), reason)
        known = replace(submit(request_id), attachment=attachment, overtaken=overtaken)
        return self.append(RequestState(known, (choice,), "3-4"))

    def step(
        self,
        tokens: dict[int, int],
        ended: dict[int, int] | None = None,
        number: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompts: tuple[PromptLogprobs, ...] = (),
        admitted: dict[int, int] | None = None,
        step_us: int = 0,
    ) -> list[Event]:
        self.number = self.number + 1 if number is None else number
        ended = ended or {}
        rows = [list(tokens).index(handle) for handle in ended]
        return self.append(
            StepResult(
                step=self.number,
                handles=np.array(list(tokens), np.int32),
                tokens=np.array(list(tokens.values()), np.int32),
                ended_rows=np.array(rows, np.int32),
                ended_flags=np.array(list(ended.values()), np.int32),
                beams=(),
                logprobs=logprobs,
                prompt_logprobs=prompts,
                admitted_handles=np.array(list(admitted or {}), np.int32),
                admitted_computed=np.array(list((admitted or {}).values()), np.int32),
                num_batched_tokens=1,
                model_us=0,
                step_us=step_us,
            )
        )


def tokens(request_id: str, *ids: int) -> TokensArrived:
    return TokensArrived(request_id, 0, list(ids), ())


def assert_lost(events: Sequence[Event], *request_ids: str) -> None:
    assert {event.request_id for event in events} == set(request_ids)
    assert len(events) == len(request_ids)
    for event in events:
        assert isinstance(event, Desynchronized)


def several(
    log: Log, *choices: tuple[int, int, Sequence[int], str], request_id: str = "a"
) -> list[Event]:
    """A state of (choice, handle, output, reason)."""
    known = tuple(
        ChoiceState(choice, handle, np.array(output, np.int32), reason)
        for choice, handle, output, reason in choices
    )
    num_choices = 1 + max(state.choice for state in known)
    return log.append(RequestState(submit(request_id, num_choices=num_choices), known, "3-4"))
