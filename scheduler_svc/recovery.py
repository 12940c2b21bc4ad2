"""Restores the requests of an engine from the outputs log.

The log is the only memory of the engine. A RequestState holds all of a request, or all but the
prompt where an earlier one has that; results add tokens, and a flag or an ending closes it.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.config import ProtocolError
from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest, RememberedRequests
from scheduler_svc.core.requests.known_requests import NOT_KNOWN, Acceptance
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.beam_search import BeamSearch
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages.endings import FinishReason
from shared.messages.outputs import (
    BeamCandidates,
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    RequestEnded,
    RequestState,
)
from shared.messages.plans import EpochStarted
from shared.messages.requests import Submit
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step

_SURVIVED = 2  # results after which a request is no suspect any more


def resume(core: Scheduler, recovery: "Recovery", fence: EntryId) -> list[Message]:
    """Hand recovered requests to a new core; returns the states to append to outputs.

    Args:
        fence: of the core's epoch.
    """
    core.start(fence)
    for request_id, ended in recovery.finished.items():
        core.remember(request_id, ended)
    states: list[Message] = []
    for found in recovery.in_order():
        states += core.recover(
            found.submit,
            found.outputs(),
            found.ended,
            found.search,
            found.num_deaths,
            found.was_admitted,
            found.accepted,
        )
    return states


@dataclass(slots=True)
class UnfinishedChoice:
    """One choice with the tokens that the log holds of it."""

    request: "Unfinished"
    choice: int
    handle: int
    output: list[int]
    num_results: int = 0  # since the last RequestState


@dataclass(slots=True)
class Unfinished:
    """A request of which at least one choice has not ended."""

    submit: Submit
    choices: dict[int, UnfinishedChoice] = field(default_factory=dict)
    ended: dict[int, EndedChoice] = field(default_factory=dict)
    search: BeamSearch | None = None  # instead of choices
    handle: int = 0  # of the search
    num_deaths: int = 0  # of workers that were computing it, one after the other
    was_admitted: bool = False
    accepted: Acceptance = NOT_KNOWN

    def outputs(self) -> dict[int, IntArray]:
        """Tokens of the choices, or beams, that go on."""
        if self.search is not None:
            return {number: beam.tokens() for number, beam in enumerate(self.search.running)}
        return {number: np.array(found.output, np.int32) for number, found in self.choices.items()}

    def end_all(self, reason: str) -> None:
        """End all choices that run."""
        for number, output in self.outputs().items():
            self.ended[number] = EndedChoice(output, reason)
        self.choices = {}


@dataclass(slots=True)
class Recovery:
    """Requests as the events of ``outputs`` leave them.

    Args:
        max_model_len: of the model, which bounds how long beams can get.

    Attributes:
        unfinished: by request id.
        finished: requests that have ended, as many as are remembered.
        requests_cursor: entries of ``requests`` up to here are reflected in the events.
    """

    max_model_len: int
    unfinished: dict[str, Unfinished] = field(default_factory=dict)
    finished: RememberedRequests = field(default_factory=lambda: RememberedRequests(window_ms=0))
    requests_cursor: EntryId = START
    _by_handle: dict[int, UnfinishedChoice] = field(default_factory=dict)
    _searches: dict[int, Unfinished] = field(default_factory=dict)  # by handle

    def apply(self, event: OutputsEvent) -> None:
        """Take the next event of the log."""
        match event:
            case EpochStarted():
                self._suspect(event)
                self._drop_handles()
            case Gap() | Damaged():
                # Later tokens would not continue those that were read.
                self._drop_handles()
            case Step():
                self._continue(event)
            case RequestState():
                self._advance(event.requests_cursor)
                self._restate(event)
            case ChoiceEnded():
                self._advance(event.requests_cursor)
                self._end_choice(event.request_id, event.choice, event.reason)
            case RequestEnded():
                self._advance(event.requests_cursor)
                self._end_request(event)
            case BeamsEnded():
                self._advance(event.requests_cursor)
                self._finish(event.request_id, event)

    def _drop_handles(self) -> None:
        self._by_handle.clear()
        self._searches.clear()

    def in_order(self) -> list[Unfinished]:
        """Unfinished requests, in the order of their acceptance.

        States of older versions do not tell that; there the gateways' clocks have to.
        """
        return sorted(
            self.unfinished.values(),
            key=lambda u: (u.accepted.arrival, u.submit.received_ms, u.submit.request_id),
        )

    def endings(self) -> list[Message]:
        """Messages that recover ``finished`` when they are applied."""
        messages: list[Message] = []
        for _, ended in self.finished.items():
            if ended.submit is None:
                continue
            choices = [
                ChoiceState(number, 0, found.output, found.reason)
                for number, found in ended.choices.items()
            ]
            if ended.message is not None:
                choices.append(ChoiceState(len(choices), 0, np.empty(0, np.int32), ""))
            messages.append(RequestState(ended.submit, tuple(choices), str(START)))
            if ended.message is not None:
                messages.append(ended.message)
        return messages

    def _suspect(self, started: EpochStarted) -> None:
        suspects: dict[int, Unfinished] = {}
        for handle in started.suspects.tolist():
            request = self._request_of(handle)
            if request is not None:
                suspects[id(request)] = request
        for request in suspects.values():
            request.num_deaths += 1
            request.was_admitted = True

    def _request_of(self, handle: int) -> Unfinished | None:
        choice = self._by_handle.get(handle)
        return self._searches.get(handle) if choice is None else choice.request

    def _restate(self, state: RequestState) -> None:
        submit = state.submit.with_prompt_of(self._submit_of(state.submit.request_id))
        self._forget(state.submit.request_id)
        self.finished.forget(state.submit.request_id)
        if submit is None:
            return  # the entry with its prompt was lost: the gateway that delivers it has it, too
        request = Unfinished(
            submit,
            num_deaths=state.num_deaths,
            was_admitted=state.was_admitted,
            accepted=Acceptance(state.arrival, state.accepted_ms),
        )
        self.unfinished[submit.request_id] = request
        if submit.sampling.beams is not None:
            self._restate_search(request, state)
            return
        for known in state.choices:
            if known.finish_reason:
                request.ended[known.choice] = EndedChoice(known.output, known.finish_reason)
                continue
            choice = UnfinishedChoice(request, known.choice, known.handle, known.output.tolist())
            request.choices[known.choice] = choice
            self._by_handle[known.handle] = choice
        if not request.choices:
            self._finish(submit.request_id, None)

    def _submit_of(self, request_id: str) -> Submit | None:
        """As an earlier entry has it."""
        if (request := self.unfinished.get(request_id)) is not None:
            return request.submit
        ended = self.finished.find(request_id)
        return None if ended is None else ended.submit

    def _restate_search(self, request: Unfinished, state: RequestState) -> None:
        submit = request.submit
        assert submit.sampling.beams is not None, "the caller looked"
        # A context that is shorter than before may not even have room for the prompt.
        room = max(self.max_model_len - len(submit.prompt), 1)
        max_output = min(submit.sampling.max_tokens, room)
        request.search = BeamSearch.restored(submit.sampling.beams, max_output, state.choices)
        handles = [known.handle for known in state.choices if not known.finish_reason]
        if handles:  # all beams have the same
            request.handle = handles[0]
            self._searches[request.handle] = request

    def _continue(self, step: Step) -> None:
        for handle, _ in step.admissions():
            if (request := self._request_of(handle)) is not None:
                request.was_admitted = True
        for candidates in step.result.beams:
            self._continue_search(candidates)
        for row, handle in enumerate(step.handles):
            choice = self._by_handle.get(handle)
            if choice is None:
                continue
            choice.output.append(step.tokens[row])
            choice.num_results += 1
            if choice.num_results == _SURVIVED:
                choice.request.num_deaths = 0
            if row in step.ends:
                request_id = choice.request.submit.request_id
                self._end_choice(request_id, choice.choice, step.ends[row])

    def _continue_search(self, candidates: BeamCandidates) -> None:
        request = self._searches.get(candidates.group)
        if request is None or request.search is None:
            return
        try:
            request.search.advance(candidates)
        except ProtocolError:
            # The scheduler that read this began a new epoch; the search goes on from before.
            del self._searches[candidates.group]
            return
        request.num_deaths = 0
        if request.search.done:
            del self._searches[candidates.group]

    def _end_choice(self, request_id: str, number: int, reason: str) -> None:
        request = self.unfinished.get(request_id)
        choice = None if request is None else request.choices.pop(number, None)
        if request is None or choice is None:
            return
        self._forget_handle(choice)
        request.ended[number] = EndedChoice(np.array(choice.output, np.int32), reason)
        if not request.choices:
            self._finish(request_id, None)

    def _end_request(self, message: RequestEnded) -> None:
        request = self.unfinished.get(message.request_id)
        if request is None:
            return
        if message.reason == FinishReason.RELEASED:
            self._forget(message.request_id)  # another engine has it
            return
        by_message = message.reason in (FinishReason.ABORT, FinishReason.ERROR)
        if by_message or request.search is not None:
            self._finish(message.request_id, message)
            return
        request.end_all(message.reason)
        self._finish(message.request_id, None)

    def _finish(self, request_id: str, message: Message | None) -> None:
        """A request has ended, by the ends of its choices or by a message."""
        request = self._forget(request_id)
        if request is None:
            return
        submit = request.submit
        self.finished.add(request_id, EndedRequest(submit, request.ended, message), now_ms=0)

    def _forget(self, request_id: str) -> Unfinished | None:
        request = self.unfinished.pop(request_id, None)
        if request is None:
            return None
        for choice in request.choices.values():
            self._forget_handle(choice)
        if self._searches.get(request.handle) is request:
            del self._searches[request.handle]
        return request

    def _forget_handle(self, choice: UnfinishedChoice) -> None:
        # In a later epoch the handle may be that of another choice.
        if self._by_handle.get(choice.handle) is choice:
            del self._by_handle[choice.handle]

    def _advance(self, cursor: str) -> None:
        # The last one counts: it is lower than one before only where requests has lost its end.
        if (found := EntryId.parse(cursor)) > START:
            self.requests_cursor = found
