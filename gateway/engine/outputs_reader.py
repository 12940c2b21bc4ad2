"""The outputs log as one gateway reads it: entries in, events per request out.

Nothing here does I/O. Tokens of two histories are never joined: where the log cannot be followed,
``_lost`` says so, and nothing of the request is believed until the log answers to an attachment
that was named afterwards, with what continues the tokens that were delivered.
"""

from collections.abc import Iterable, Iterator, Sequence

from gateway.engine.beam_hypotheses import find_fault, token_logprobs
from gateway.engine.delivered_tokens import DeliveredChoice, DeliveredRequest
from gateway.engine.events import (
    Attached,
    ChoiceFinished,
    Desynchronized,
    Event,
    PrefixFound,
    PromptMissing,
    PromptScored,
    RequestAccepted,
    RequestFailed,
    Superseded,
    TokensArrived,
    UnknownRequest,
)
from gateway.engine.log_position import Fit, Place
from gateway.engine.step_results import admissions, sampled_rows
from shared.bus.api import Entry, EntryId
from shared.codec import decode
from shared.errors import DecodeError
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from shared.messages.plans import EpochStarted
from shared.messages.requests import ChoiceView, delivery_of

# Ends of which the log tells all: what led to them need not have been seen.
GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)


class Sessions:
    """All requests whose outputs this gateway waits for.

    Attributes:
        requests_cursor: entries of the requests log up to here are reflected in outputs, and may
            be trimmed; None if that is not known.
    """

    def __init__(self) -> None:
        self.requests_cursor: EntryId | None = None
        self._place = Place()
        self._requests: dict[str, DeliveredRequest] = {}
        self._by_handle: dict[int, DeliveredChoice] = {}
        self._by_group: dict[int, DeliveredRequest] = {}  # beam searches
        # Accepted in an earlier epoch; the states of this one come before its first result.
        self._unstated: set[str] = set()
        self._lookups: dict[str, str] = {}  # attachments by request, of which nothing is known yet

    @property
    def cursor(self) -> EntryId:
        """Last entry of the outputs log that was applied."""
        return self._place.cursor

    def __len__(self) -> int:
        return len(self._requests)

    def open(
        self,
        request_id: str,
        attachment: str,
        num_choices: int = 1,
        scored: bool = False,
        is_search: bool = False,
        views: Sequence[ChoiceView] = (),
        overtaken: tuple[str, ...] = (),
    ) -> None:
        """Wait for a request; before its Submit is appended, or its state could be missed.

        Args:
            attachment: under which the log will know the delivery.
            views: by choice, what the client has already; empty for nothing at all.
            overtaken: deliveries that the log has seen taken over, as far as is known.
        """
        choices = [DeliveredChoice(request_id, index, scored) for index in range(num_choices)]
        request = DeliveredRequest(
            choices, delivery_of(attachment), attachment, is_search, overtaken=overtaken
        )
        if views:
            request.begin_with(views)
        self._requests[request_id] = request

    def attach(self, request_id: str) -> DeliveredRequest:
        """Believe nothing more of a request until the log answers to its new attachment.

        Returns:
            What was delivered so far.
        """
        request = self._requests[request_id]
        self._forget_handles(request)
        request.attach()
        return request

    def look_up(self, request_id: str, attachment: str) -> None:
        """Wait for what the log knows of a request, and for that alone."""
        self._lookups[request_id] = attachment

    def attachment_of(self, request_id: str) -> str | None:
        """Under which the log knows an open request."""
        request = self._requests.get(request_id)
        return None if request is None else request.attachment

    def awaits(self, request_id: str) -> bool:
        """The log has not answered yet to the request's attachment."""
        request = self._requests.get(request_id)
        return request_id in self._lookups or (request is not None and request.awaits)

    def is_unheard_of(self, request_id: str) -> bool:
        """The log has to speak of an open request before there can be anything to deliver.

        It will, once a Submit was read or a scheduler has taken over, unless that was trimmed.
        """
        request = self._requests.get(request_id)
        if request is None or request.awaits or request.has_ended:
            return False
        return not request.was_stated or request_id in self._unstated

    def close(self, request_id: str) -> None:
        """Nobody waits any more."""
        self._lookups.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forget_handles(request)

    def close_choice(
        self, request_id: str, index: int, num_tokens: int, reason: FinishReason
    ) -> None:
        """The choice ended with so many tokens, whatever the engine still makes of it."""
        request = self._requests.get(request_id)
        if request is None or request.choices[index].ended:
            return
        choice = request.choices[index]
        choice.finish_reason = reason
        del choice.tokens[num_tokens:]
        self._forget_handle(choice)

    def server_restarted(self, last: EntryId) -> list[Event]:
        """The server is not the one that was read so far; ``last`` is the log's last entry now.

        Whatever was said to the server that was may be lost, and so may what it said.
        """
        self.requests_cursor = None
        self._place.server_restarted(last)
        return self._lose_all("Redis was restarted")

    def log_deleted(self) -> list[Event]:
        """The server is the same, and all that was in the log is gone."""
        self.requests_cursor = None
        self._place.log_deleted()
        return self._lose_all("outputs was deleted")

    def apply(self, entry: Entry) -> list[Event]:
        """What one entry of the outputs log means for the open requests."""
        self._place.read(entry.id)
        events: list[Event] = []
        for data in entry.messages:
            try:
                events += self._apply_message(entry.id.epoch, data)
            except (DecodeError, ValueError, IndexError):
                # Nobody can read it, so the scheduler starts a new epoch and says how things stand.
                self._place.await_epoch()
        return events

    def _apply_message(self, epoch: int, data: bytes) -> Iterable[Event]:
        message = decode(data)
        if isinstance(message, EpochStarted):
            self._start_epoch(message)
            return ()
        missed: list[Event] = []
        fit = self._place.enter(epoch)
        if fit is Fit.PASSED:
            return ()
        if fit is Fit.GAP:
            missed = self._lose_all("entries are missing in the log")
        if isinstance(message, StepResult):
            return [*missed, *self._on_result(message)]
        if isinstance(message, RequestState):
            return [*missed, *self._on_state(message)]
        if isinstance(message, ChoiceEnded):
            return [*missed, *self._on_choice_ended(message)]
        if isinstance(message, BeamsEnded):
            return [*missed, *self._on_beams_ended(message)]
        if isinstance(message, RequestEnded):
            return [*missed, *self._on_ended(message)]
        raise DecodeError(f"{type(message).__name__} does not belong into outputs")

    def _start_epoch(self, started: EpochStarted) -> None:
        if not self._place.start_epoch(started.epoch, started.nonce):
            return
        # The new scheduler may know less of the requests log than the one before.
        self.requests_cursor = None
        # Handles are unique within an epoch only; each request's new ones come with its state.
        self._unstated = {
            request_id
            for request_id, request in self._requests.items()
            if request.was_stated and not request.awaits and not request.has_ended
        }
        for request in self._requests.values():
            self._forget_handles(request)

    def _on_result(self, result: StepResult) -> Iterator[Event]:
        fit = self._place.take_step(result.step)
        if fit is Fit.PASSED:
            return
        if fit is Fit.GAP:
            yield from self._lose_all("results are missing in the log")
        # A result counts as a whole or not at all: what could be wrong is looked at first.
        rows = sampled_rows(result)
        admitted = admissions(result)
        if self._unstated:
            forgotten = [found for found in self._requests if found in self._unstated]
            self._unstated = set()
            for request_id in forgotten:
                yield from self._lost(request_id, "the log has forgotten this request")
        if not self._by_handle and not self._by_group:
            return
        for handle, num_computed in admitted:
            yield from self._on_admission(handle, num_computed)
        for part in result.prompt_logprobs:
            scored = self._by_handle.get(part.handle)
            if scored is not None and scored.index == 0:
                yield PromptScored(scored.request_id, part.positions)
        logprobs = {item.row: item for item in result.logprobs}
        for row, (handle, token, flag) in enumerate(rows):
            choice = self._by_handle.get(handle)
            if choice is None:
                continue
            choice.tokens.append(token)
            scores = (logprobs[row],) if choice.scored and row in logprobs else ()
            yield TokensArrived(choice.request_id, choice.index, [token], scores)
            if flag is not None:
                yield self._end(choice, flag.finish_reason())

    def _on_admission(self, handle: int, num_computed: int) -> Iterator[Event]:
        """Only the first admission is a prompt's: later ones find what the request left itself."""
        choice = self._by_handle.get(handle)
        if choice is None:
            request = self._by_group.get(handle)
        else:
            request = self._requests[choice.request_id]
        if request is not None and not request.was_admitted:
            request.was_admitted = True
            yield PrefixFound(request.choices[0].request_id, num_computed)

    def _on_state(self, state: RequestState) -> Iterable[Event]:
        self.requests_cursor = EntryId.parse(state.requests_cursor)
        request_id, attachment = state.submit.request_id, state.submit.attachment
        self._unstated.discard(request_id)
        looking = self._lookups.get(request_id)
        if looking == attachment and not state.submit.lacks_prompt:
            del self._lookups[request_id]
            return (_looked_up(state),)
        if looking in state.submit.overtaken:
            del self._lookups[request_id]
            return (Superseded(request_id),)
        request = self._requests.get(request_id)
        if request is None or request.has_ended:
            return ()
        if request.is_overtaken_in(state):
            self.close(request_id)
            return (Superseded(request_id),)
        if request.awaits and attachment != request.attachment:
            return ()  # the log does not know yet what was delivered
        request.attachment = attachment
        request.overtaken = state.submit.overtaken
        if request.is_search:
            return self._continue_search(request, state)
        return self._continue_choices(request, state)

    def _continue_search(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        """Which beams there are is the engine's affair: none was delivered."""
        self._forget_handles(request)
        running = (beam.handle for beam in state.choices if not beam.finish_reason)
        request.group = next(running, None)
        if request.group is not None:
            self._by_group[request.group] = request
        yield from self._joined(request, state)

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
                # The engine knew what was delivered, and has something else all the same: what it
                # has may be another call's, which whoever asked can tell from its Submit.
                yield Attached(request_id, state.submit)
                yield self._given_up(request_id, found)
            else:
                yield from self._lost(request_id, found)
            return
        if request.lacks_scores(found):
            # The answer was missed, and tokens behind it: they must be drawn again.
            request.awaits = False
            yield from self._lost(request_id, "the log has no log-probabilities of what is new")
            return
        for index in found:
            if reasons[index] in (FinishReason.ABORT, FinishReason.ERROR):
                yield self._failed(
                    request_id, f"the request ended with {known[index].finish_reason!r}"
                )
                return
        yield from self._joined(request, state)
        self._forget_handles(request)
        for index, more in found.items():
            choice = request.choices[index]
            if more:
                choice.tokens += more
                yield TokensArrived(request_id, index, more, ())
            reason = reasons[index]
            if reason is not None:
                yield self._end(choice, reason)
            else:
                choice.handle = known[index].handle
                self._by_handle[choice.handle] = choice

    def _joined(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        if request.awaits:
            yield Attached(state.submit.request_id, state.submit)
        elif not request.was_stated:
            yield RequestAccepted(state.submit.request_id)
        request.was_stated, request.awaits = True, False

    def _on_choice_ended(self, message: ChoiceEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        reason = FinishReason(message.reason)
        request = self._requests.get(message.request_id)
        if request is None or request.awaits:
            return
        if not 0 <= message.choice < len(request.choices):
            yield from self._lost(message.request_id, "the log has other choices of this request")
            return
        choice = request.choices[message.choice]
        if not choice.ended:
            yield self._end(choice, reason)

    def _on_beams_ended(self, message: BeamsEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        request_id = message.request_id
        self._unstated.discard(request_id)
        # Who looks it up is not answered yet: how to show it stands in a state, which comes when
        # the question is repeated.
        request = self._requests.get(request_id)
        if request is None or request.has_ended:
            return
        request.awaits = False
        if request.is_search:
            fault = find_fault(message, len(request.choices))
        else:
            fault = "no search was asked for"
        if fault is not None:
            yield self._failed(request_id, f"a beam search ended with what is no answer: {fault}")
            return
        self._forget_handles(request)
        for choice, found in zip(request.choices, message.hypotheses, strict=True):
            tokens: list[int] = found.tokens.tolist()
            logprobs = token_logprobs(found) if choice.scored else ()
            yield TokensArrived(request_id, choice.index, tokens, logprobs)
            yield self._end(choice, FinishReason(found.finish_reason), found.score)

    def _on_ended(self, message: RequestEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        request_id, reason = message.request_id, FinishReason(message.reason)
        self._unstated.discard(request_id)
        if request_id in self._lookups and reason not in GOOD_ENDS:
            del self._lookups[request_id]
            yield UnknownRequest(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.has_ended:
            self.close(request_id)
        elif reason is FinishReason.UNKNOWN:
            # An answer to a gateway that has the id alone, or to an Attach without a prompt.
            if request.awaits:
                yield PromptMissing(request_id)
            yield from self._lost(request_id, "the engine does not remember the request")
        elif reason is FinishReason.ABORT:
            # Somebody waits here: what was given up is another delivery of it, or this gateway was
            # taken for dead.
            yield from self._lost(request_id, "another delivery of the request was given up")
        elif reason not in GOOD_ENDS or (request.is_search and reason is not FinishReason.DEADLINE):
            error = message.error or f"the request ended with {reason.value!r}"
            refused = reason is FinishReason.OVERLOADED
            # An Attach that follows the refused Submit would begin it all the same.
            knows = not (refused and request.awaits)
            yield self._failed(request_id, error, knows, refused, message.for_all)
        elif request.is_search or not request.awaits:
            for choice in request.choices:
                if not choice.ended:
                    yield self._end(choice, reason)

    def _lose_all(self, why: str) -> list[Event]:
        return [
            event for request_id in list(self._requests) for event in self._lost(request_id, why)
        ]

    def _lost(self, request_id: str, why: str) -> Iterator[Event]:
        """The log and what was delivered do not fit together."""
        request = self._requests[request_id]
        if not request.has_ended and not request.awaits:
            self._forget_handles(request)
            request.awaits, request.attachment = True, ""  # no answer can be to this one
            yield Desynchronized(request_id, why)

    def _given_up(self, request_id: str, why: str) -> Event:
        """What was delivered cannot be continued at all."""
        self.close(request_id)
        return RequestFailed(request_id, f"the stream cannot be continued: {why}", False)

    def _failed(
        self,
        request_id: str,
        error: str,
        ended_in_engine: bool = True,
        overloaded: bool = False,
        for_all: bool = False,
    ) -> Event:
        """The engine has given the request up."""
        self.close(request_id)
        return RequestFailed(request_id, error, ended_in_engine, overloaded, for_all)

    def _end(
        self, choice: DeliveredChoice, reason: FinishReason, beam_score: float | None = None
    ) -> Event:
        choice.finish_reason = reason
        self._forget_handle(choice)
        return ChoiceFinished(choice.request_id, choice.index, reason, beam_score)

    def _forget_handles(self, request: DeliveredRequest) -> None:
        for choice in request.choices:
            self._forget_handle(choice)
        if request.group is not None:
            self._by_group.pop(request.group, None)
            request.group = None

    def _forget_handle(self, choice: DeliveredChoice) -> None:
        if choice.handle is not None:
            self._by_handle.pop(choice.handle, None)
            choice.handle = None


def _looked_up(state: RequestState) -> Attached:
    choices = sorted(state.choices, key=lambda choice: choice.choice)
    outputs = tuple(tuple(choice.output.tolist()) for choice in choices)
    return Attached(
        state.submit.request_id,
        state.submit,
        outputs,
        tuple(choice.finish_reason for choice in choices),
    )
