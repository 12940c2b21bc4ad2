"""Turns what the outputs log holds into events of the requests that a gateway delivers.

Tokens of two histories are never joined. Where the log does not continue what was delivered, a
Desynchronized is the last event of the request until the log answers an Attach that was sent
afterwards, with tokens that do continue it.
"""

from collections.abc import Iterable, Iterator

from gateway.engine.beam_hypotheses import find_fault, token_logprobs
from gateway.engine.delivered_tokens import DeliveredChoice, DeliveredRequest
from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    Event,
    PrefixFound,
    PromptInLog,
    PromptMissing,
    PromptScored,
    Released,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.engine.open_requests import OpenRequests
from gateway.tracing.phases import PhaseTracker
from shared.bus.api import Entry, EntryId
from shared.messages.endings import GRAMMAR_FAILED, FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState
from shared.messages.plans import EpochStarted
from shared.outputs_log.events import Damaged, Gap, OutputsEvent, Step
from shared.outputs_log.reader import OutputsReader

_NOT_ENDED = (FinishReason.RELEASED, FinishReason.UNKNOWN)
# Ends that the log states in full: what led to them need not have been read.
GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)


class OutputsFollower:
    """Follows the outputs log for all open requests. It does no I/O.

    Args:
        phases: follows those of traces; None: no traces are recorded.

    Attributes:
        requests: those that are open.
    """

    def __init__(self, phases: PhaseTracker | None = None) -> None:
        self.requests = OpenRequests()
        self._reader = OutputsReader()
        self._phases = phases

    @property
    def cursor(self) -> EntryId:
        """Last entry of the outputs log that was applied."""
        return self._reader.position.cursor

    @property
    def requests_cursor(self) -> EntryId | None:
        """Entries of the requests log up to here may be trimmed; None if that is not known."""
        return self._reader.requests_cursor

    def server_restarted(self, last: EntryId) -> list[Event]:
        """Attach to all requests: the server was restarted, and may have lost what was written.

        Args:
            last: last entry of the outputs log now.
        """
        self._reader.server_restarted(last)
        return self._desynchronize_all("Redis was restarted")

    def log_deleted(self) -> list[Event]:
        """Attach to all requests: the outputs log was deleted, and the server is the same."""
        self._reader.log_deleted()
        return self._desynchronize_all("outputs was deleted")

    def apply(self, entry: Entry) -> list[Event]:
        """Events of the open requests in one entry of the outputs log."""
        events: list[Event] = []
        for event in self._reader.read(entry):
            events += self._apply(event) if self._phases is None else self._traced(event)
        return events

    def found(self, state: RequestState) -> list[Event]:
        """Events of a state that answers a look-up, with the prompt that it referred to."""
        if self.requests.lookup_of(state.submit.request_id) != state.submit.attachment:
            return []
        return list(self._on_state(state))

    def _traced(self, event: OutputsEvent) -> list[Event]:
        assert self._phases is not None
        if isinstance(event, Step):
            self._phases.admitted(event, self.requests)
        made = list(self._apply(event))
        self._phases.apply(event, made, self.requests)
        return made

    def _apply(self, event: OutputsEvent) -> Iterable[Event]:
        match event:
            case Step():
                return self._on_step(event)
            case RequestState():
                return self._on_state(event)
            case RequestEnded():
                return self._on_ended(event)
            case ChoiceEnded():
                return self._on_choice_ended(event)
            case BeamsEnded():
                return self._on_beams_ended(event)
            case EpochStarted():
                self.requests.start_epoch()
            case Gap():
                return self._desynchronize_all(event.why)
            case Damaged():
                # The scheduler cannot read it either: it starts a new epoch and restates all.
                self._reader.position.await_epoch()
        return ()

    # -------------------------------------------------------------------- tokens

    def _on_step(self, step: Step) -> Iterator[Event]:
        requests = self.requests
        for request_id in requests.take_not_restated():
            yield from self._desynchronize(request_id, "the log has forgotten this request")
        if not requests.has_handles:
            return
        for handle, num_computed in step.admissions():
            yield from self._on_admission(handle, num_computed)
        result = step.result
        for part in result.prompt_logprobs:
            scored = requests.by_handle.get(part.handle)
            if scored is not None and scored.index == 0:
                yield PromptScored(scored.request_id, part.positions)
        logprobs = {item.row: item for item in result.logprobs}
        for row, handle in enumerate(step.handles):
            choice = requests.by_handle.get(handle)
            if choice is None:
                continue
            if step.ends.get(row) is FinishReason.ERROR:
                yield self._fail(choice.request_id, GRAMMAR_FAILED)
                continue
            token = step.tokens[row]
            choice.tokens.append(token)
            scores = (logprobs[row],) if choice.scored and row in logprobs else ()
            yield TokensArrived(choice.request_id, choice.index, [token], scores)
            if row in step.ends:
                yield self._end(choice, step.ends[row])

    def _on_admission(self, handle: int, num_computed: int) -> Iterator[Event]:
        """Later admissions of a request find blocks that it computed itself."""
        request = self.requests.request_of(handle)
        if request is not None and not request.was_admitted:
            request.was_admitted = True
            yield PrefixFound(request.choices[0].request_id, num_computed)

    # -------------------------------------------------------------------- states

    def _on_state(self, state: RequestState) -> Iterable[Event]:
        requests = self.requests
        request_id, attachment = state.submit.request_id, state.submit.attachment
        requests.restated(request_id)
        lookup = requests.lookup_of(request_id)
        if lookup == attachment and state.prompt_at:
            return (PromptInLog(request_id, state),)
        if lookup == attachment and state.has_prompt:
            requests.end_lookup(request_id)
            return (_looked_up(state),)
        if lookup in state.submit.overtaken:
            requests.end_lookup(request_id)
            return (Superseded(request_id),)
        request = requests.find(request_id)
        if request is None or request.has_ended:
            return ()
        if request.is_overtaken_in(state):
            requests.close(request_id)
            return (Superseded(request_id),)
        if request.awaits and attachment != request.attachment:
            return ()  # written before the scheduler read the Attach
        request.attachment = attachment
        request.overtaken = state.submit.overtaken
        if request.is_search:
            return self._continue_search(request, state)
        return self._continue_choices(request, state)

    def _continue_search(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        """Take the handle of the beams; none of them was delivered."""
        self.requests.drop_handles(request)
        running = (beam.handle for beam in state.choices if not beam.finish_reason)
        self.requests.set_group(request, next(running, None))
        yield from self._attached(request, state)

    def _continue_choices(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        request_id = state.submit.request_id
        known = {choice.choice: choice for choice in state.choices}
        reasons = {
            index: FinishReason(choice.finish_reason) if choice.finish_reason else None
            for index, choice in known.items()
        }
        found = request.continuations(state)
        if isinstance(found, str):
            if request.awaits:
                # The engine has read what was delivered, and has something else all the same: that
                # may be another call's, which shows in its Submit.
                yield Attached(request_id, state.submit)
                yield self._give_up(request_id, found)
            else:
                yield from self._desynchronize(request_id, found)
            return
        if request.lacks_scores(found):
            # The answer was missed, and tokens behind it: they must be generated again.
            request.awaits = False
            why = "the log has no log-probabilities of what is new"
            yield from self._desynchronize(request_id, why)
            return
        for index in found:
            if reasons[index] in (FinishReason.ABORT, FinishReason.ERROR):
                error = f"the request ended with {known[index].finish_reason!r}"
                yield self._fail(request_id, error)
                return
        yield from self._attached(request, state)
        self.requests.drop_handles(request)
        for index, more in found.items():
            choice = request.choices[index]
            if more:
                choice.tokens += more
                yield TokensArrived(request_id, index, more, ())
            reason = reasons[index]
            if reason is not None:
                yield self._end(choice, reason)
            else:
                self.requests.set_handle(choice, known[index].handle)

    def _attached(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        if request.awaits:
            yield Attached(state.submit.request_id, state.submit)
        elif not request.was_stated:
            yield RequestAccepted(state.submit.request_id)
        request.was_stated, request.awaits = True, False

    # ---------------------------------------------------------------------- ends

    def _on_choice_ended(self, message: ChoiceEnded) -> Iterator[Event]:
        request = self.requests.find(message.request_id)
        if request is None or request.awaits:
            return
        if not 0 <= message.choice < len(request.choices):
            why = "the log has other choices of this request"
            yield from self._desynchronize(message.request_id, why)
            return
        choice = request.choices[message.choice]
        if not choice.ended:
            yield self._end(choice, FinishReason(message.reason))

    def _on_beams_ended(self, message: BeamsEnded) -> Iterator[Event]:
        request_id = message.request_id
        self.requests.restated(request_id)
        # A look-up goes on: only a state tells how to show the answer. It comes at the next Attach.
        request = self.requests.find(request_id)
        if request is None or request.has_ended:
            return
        request.awaits = False
        if request.is_search:
            fault = find_fault(message, len(request.choices))
        else:
            fault = "no search was asked for"
        if fault is not None:
            yield self._fail(request_id, f"a beam search ended with what is no answer: {fault}")
            return
        self.requests.drop_handles(request)
        for choice, found in zip(request.choices, message.hypotheses, strict=True):
            tokens: list[int] = found.tokens.tolist()
            logprobs = token_logprobs(found) if choice.scored else ()
            yield TokensArrived(request_id, choice.index, tokens, logprobs)
            yield self._end(choice, FinishReason(found.finish_reason), found.score)

    def _on_ended(self, message: RequestEnded) -> Iterator[Event]:
        requests = self.requests
        request_id, reason = message.request_id, FinishReason(message.reason)
        requests.restated(request_id)
        if requests.lookup_of(request_id) is not None and reason not in GOOD_ENDS:
            requests.end_lookup(request_id)
            yield UnknownRequest(request_id, reason in _NOT_ENDED)
        request = requests.find(request_id)
        if request is None:
            return
        if request.has_ended:
            requests.close(request_id)
        elif reason is FinishReason.RELEASED:
            yield from self._desynchronize(request_id, "the engine hands it over")
            yield Released(request_id)
        elif reason is FinishReason.UNKNOWN:
            # It answers a gateway that has the id alone, or an Attach without a prompt.
            if request.awaits:
                yield PromptMissing(request_id)
            yield from self._desynchronize(request_id, "the engine does not remember the request")
        elif reason is FinishReason.ABORT:
            # A call waits for it: another delivery was aborted, or this gateway's lease ran out.
            why = "another delivery of the request was given up"
            yield from self._desynchronize(request_id, why)
        elif reason not in GOOD_ENDS or (request.is_search and reason is not FinishReason.DEADLINE):
            error = message.error or f"the request ended with {reason.value!r}"
            refused = reason is FinishReason.OVERLOADED
            # An Attach that follows the refused Submit would begin it all the same.
            ended = not (refused and request.awaits)
            yield self._fail(request_id, error, ended, refused, message.for_all)
        elif request.is_search or not request.awaits:
            for choice in request.choices:
                if not choice.ended:
                    yield self._end(choice, reason)

    def _end(
        self, choice: DeliveredChoice, reason: FinishReason, beam_score: float | None = None
    ) -> Event:
        choice.finish_reason = reason
        self.requests.drop_handle(choice)
        return ChoiceFinished(choice.request_id, choice.index, reason, beam_score)

    # ------------------------------------------------------------------ failures

    def _desynchronize_all(self, why: str) -> list[Event]:
        return [
            event
            for request_id in self.requests.ids()
            for event in self._desynchronize(request_id, why)
        ]

    def _desynchronize(self, request_id: str, why: str) -> Iterator[Event]:
        """Ignore the log for a request until the answer to an Attach."""
        request = self.requests.find(request_id)
        assert request is not None, f"{request_id} is not open"
        if not request.has_ended and not request.awaits:
            self.requests.drop_handles(request)
            request.awaits, request.attachment = True, ""  # no answer can be to this one
            if self._phases is not None:
                self._phases.lost(request_id)
            yield Desynchronized(request_id, why)

    def _give_up(self, request_id: str, why: str) -> Event:
        """Close a request that cannot be continued from what was delivered."""
        self.requests.close(request_id)
        return RequestFailed(request_id, f"the stream cannot be continued: {why}", False)

    def _fail(
        self,
        request_id: str,
        error: str,
        ended_in_engine: bool = True,
        overloaded: bool = False,
        for_all: bool = False,
    ) -> Event:
        """Close a request that the engine has ended with an error."""
        self.requests.close(request_id)
        return RequestFailed(request_id, error, ended_in_engine, overloaded, for_all)


def _looked_up(state: RequestState) -> Attached:
    choices = sorted(state.choices, key=lambda choice: choice.choice)
    outputs = tuple(tuple(choice.output.tolist()) for choice in choices)
    return Attached(
        state.submit.request_id,
        state.submit,
        outputs,
        tuple(choice.finish_reason for choice in choices),
    )
