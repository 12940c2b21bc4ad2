"""The outputs log as one gateway reads it: entries in, events per request out.

Nothing here does I/O. Tokens of two histories are never joined: where the log cannot be followed,
the request is given up in one place, ``_lost``.
"""

from collections.abc import Iterable, Iterator

from gateway.delivered import DeliveredChoice, DeliveredRequest
from gateway.events import (
    ChoiceFinished,
    Event,
    PrefixFound,
    PromptScored,
    RequestAccepted,
    RequestFailed,
    TokensArrived,
)
from gateway.hypotheses import find_fault, token_logprobs
from gateway.place import Fit, Place
from gateway.results import admissions, sampled_rows
from shared.bus.api import Entry, EntryId
from shared.codec import decode
from shared.errors import DecodeError
from shared.messages import (
    BeamsEnded,
    ChoiceEnded,
    EpochStarted,
    FinishReason,
    RequestEnded,
    RequestState,
    StepResult,
)

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE)


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

    @property
    def cursor(self) -> EntryId:
        """Last entry of the outputs log that was applied."""
        return self._place.cursor

    def __len__(self) -> int:
        return len(self._requests)

    def open(
        self, request_id: str, num_choices: int = 1, scored: bool = False, is_search: bool = False
    ) -> None:
        """Wait for a request; before its Submit is appended, or its state could be missed."""
        choices = [DeliveredChoice(request_id, index, scored) for index in range(num_choices)]
        self._requests[request_id] = DeliveredRequest(choices, is_search)

    def close(self, request_id: str) -> None:
        """Nobody waits any more."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forget_handles(request)

    def close_choice(self, request_id: str, index: int) -> None:
        """Nobody waits for more of this choice, whatever the engine still makes of it."""
        request = self._requests.get(request_id)
        if request is not None:
            request.choices[index].ended = True
            self._forget_handle(request.choices[index])

    def server_restarted(self, last: EntryId) -> None:
        """The server is not the one that was read so far; ``last`` is the log's last entry now."""
        self.requests_cursor = None
        self._place.server_restarted(last)

    def begin_after(self, last: EntryId) -> None:
        """Nothing up to here is of interest."""
        self._place.cursor = last

    def apply(self, entry: Entry) -> list[Event]:
        """What one entry of the outputs log means for the open requests."""
        self._place.cursor = entry.id
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
            missed = self._lose_all("the start of an epoch is missing")
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
        if not self._place.start_epoch(started.epoch):
            return
        # The new scheduler may know less of the requests log than the one before.
        self.requests_cursor = None
        # Handles are unique within an epoch only; each request's new ones come with its state.
        self._unstated = {
            request_id
            for request_id, request in self._requests.items()
            if request.was_stated and not request.has_ended
        }
        for request in self._requests.values():
            self._forget_handles(request)

    def _on_result(self, result: StepResult) -> Iterator[Event]:
        fit = self._place.take_step(result.step)
        if fit is Fit.PASSED:
            return
        if fit is Fit.GAP:
            yield from self._lose_all("results are missing in the log")
            return
        # A result counts as a whole or not at all: what could be wrong is looked at first.
        rows = sampled_rows(result)
        admitted = admissions(result)
        if self._unstated:
            for request_id in self._unstated & self._requests.keys():
                yield self._lost(request_id, "the log has forgotten this request")
            self._unstated.clear()
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
        self._unstated.discard(state.submit.request_id)
        request = self._requests.get(state.submit.request_id)
        if request is None:
            return ()
        first = () if request.was_stated else (RequestAccepted(state.submit.request_id),)
        request.was_stated = True
        if request.is_search:
            self._continue_search(request, state)
            return first
        return (*first, *self._continue_choices(request, state))

    def _continue_search(self, request: DeliveredRequest, state: RequestState) -> None:
        """Which beams there are is the engine's affair: none was delivered."""
        self._forget_handles(request)
        running = (beam.handle for beam in state.choices if not beam.finish_reason)
        request.group = None if request.has_ended else next(running, None)
        if request.group is not None:
            self._by_group[request.group] = request

    def _continue_choices(self, request: DeliveredRequest, state: RequestState) -> Iterator[Event]:
        request_id = state.submit.request_id
        known = {choice.choice: choice for choice in state.choices}
        reasons = {
            index: FinishReason(choice.finish_reason) if choice.finish_reason else None
            for index, choice in known.items()
        }
        if sorted(known) != list(range(len(request.choices))):
            yield self._lost(request_id, "the log has other choices of this request")
            return
        self._forget_handles(request)
        for index, choice in enumerate(request.choices):
            if choice.ended:
                continue
            more = choice.continuation(known[index])
            if more is None:
                yield self._lost(request_id, "the log has another history of this request")
                return
            if more:
                choice.tokens += more
                yield TokensArrived(request_id, index, more, ())
            reason = reasons[index]
            if reason is not None:
                yield self._end(choice, reason)
            else:
                choice.handle = known[index].handle
                self._by_handle[choice.handle] = choice

    def _on_choice_ended(self, message: ChoiceEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        reason = FinishReason(message.reason)
        request = self._requests.get(message.request_id)
        if request is None:
            return
        if not 0 <= message.choice < len(request.choices):
            yield self._lost(message.request_id, "the log has other choices of this request")
            return
        choice = request.choices[message.choice]
        if not choice.ended:
            yield self._end(choice, reason)

    def _on_beams_ended(self, message: BeamsEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        request_id = message.request_id
        self._unstated.discard(request_id)
        request = self._requests.get(request_id)
        if request is None or request.has_ended:
            return
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
        request = self._requests.get(message.request_id)
        if request is None:
            return
        reason = FinishReason(message.reason)
        self._unstated.discard(message.request_id)
        if request.has_ended:
            self.close(message.request_id)
        elif reason not in _GOOD_ENDS or (
            request.is_search and reason is not FinishReason.DEADLINE
        ):
            error = message.error or f"the request ended with {reason.value!r}"
            yield self._failed(message.request_id, error, reason is FinishReason.OVERLOADED)
        else:
            for choice in request.choices:
                if not choice.ended:
                    yield self._end(choice, reason)

    def _lose_all(self, why: str) -> list[Event]:
        return [self._lost(request_id, why) for request_id in list(self._requests)]

    def _lost(self, request_id: str, why: str) -> Event:
        """The log and what was delivered do not fit together: here a request could attach anew."""
        self.close(request_id)
        return RequestFailed(request_id, f"the stream cannot be continued: {why}", False)

    def _failed(self, request_id: str, error: str, overloaded: bool = False) -> Event:
        """The engine has given the request up."""
        self.close(request_id)
        return RequestFailed(request_id, error, engine_knows=True, overloaded=overloaded)

    def _end(
        self, choice: DeliveredChoice, reason: FinishReason, beam_score: float | None = None
    ) -> Event:
        choice.ended = True
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
