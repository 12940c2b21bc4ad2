"""The outputs log as one gateway reads it: entries in, events per request out.

Nothing here does I/O. Tokens of two histories are never joined: where the log cannot be followed,
the request is given up in one place, ``_lost``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.bus.api import START, Entry, EntryId
from shared.codec import decode
from shared.errors import DecodeError
from shared.messages import (
    ChoiceEnded,
    ChoiceState,
    EndFlag,
    EpochStarted,
    FinishReason,
    RequestEnded,
    RequestState,
    StepResult,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """More of one choice."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...]  # one for each token, or none at all


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a run of prompt tokens; a later one replaces an earlier one."""

    request_id: str
    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """So much of a request's tokens lay in the prefix cache when it was first admitted."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The engine generates no more of this choice."""

    request_id: str
    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No more will come for this request."""

    request_id: str
    error: str
    engine_knows: bool  # False: the engine may still be generating, and must be told


Event = TokensArrived | PromptScored | PrefixFound | ChoiceFinished | RequestFailed


@dataclass(slots=True)
class _Choice:
    """What was delivered of one choice."""

    request_id: str
    index: int
    scored: bool  # its tokens come with log-probabilities
    tokens: list[int] = field(default_factory=list)
    handle: int | None = None
    ended: bool = False


@dataclass(slots=True)
class _Request:
    """A request that somebody waits for."""

    choices: list[_Choice]
    was_admitted: bool = False

    @property
    def has_ended(self) -> bool:
        return all(choice.ended for choice in self.choices)


class Sessions:
    """All requests whose outputs this gateway waits for.

    Attributes:
        cursor: last entry of the outputs log that was applied.
        requests_cursor: entries of the requests log up to here are reflected in outputs, and may
            be trimmed; None if that is not known.
    """

    def __init__(self) -> None:
        self.cursor: EntryId = START
        self.requests_cursor: EntryId | None = None
        self._epoch: int | None = None
        self._step: int | None = None  # None: the next result may be any
        self._awaits_epoch = False
        self._requests: dict[str, _Request] = {}
        self._by_handle: dict[int, _Choice] = {}
        # Accepted in an earlier epoch; the states of this one come before its first result.
        self._unstated: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, request_id: str, num_choices: int = 1, scored: bool = False) -> None:
        """Wait for a request; before its Submit is appended, or its state could be missed."""
        self._requests[request_id] = _Request(
            [_Choice(request_id, index, scored) for index in range(num_choices)]
        )

    def close(self, request_id: str) -> None:
        """Nobody waits any more."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for choice in request.choices:
                self._forget_handle(choice)

    def close_choice(self, request_id: str, index: int) -> None:
        """Nobody waits for more of this choice, whatever the engine still makes of it."""
        request = self._requests.get(request_id)
        if request is not None:
            request.choices[index].ended = True
            self._forget_handle(request.choices[index])

    def server_restarted(self, last: EntryId) -> None:
        """The server is not the one that was read so far; ``last`` is the log's last entry now."""
        self.requests_cursor = None
        if last < self.cursor:
            # The end of the log is lost. Ids below the cursor will be given out again; what they
            # say is not what was delivered, until a scheduler has started anew.
            self.cursor = START
            self._awaits_epoch = True

    def apply(self, entry: Entry) -> list[Event]:
        """What one entry of the outputs log means for the open requests."""
        self.cursor = entry.id
        events: list[Event] = []
        for data in entry.messages:
            try:
                events += self._apply_message(entry.id.epoch, data)
            except (DecodeError, ValueError, IndexError):
                # Nobody can read it, so the scheduler starts a new epoch and says how things stand.
                self._awaits_epoch = True
        return events

    def _apply_message(self, epoch: int, data: bytes) -> Iterable[Event]:
        message = decode(data)
        if isinstance(message, EpochStarted):
            self._start_epoch(message)
            return ()
        if self._epoch is not None and epoch < self._epoch:
            return ()
        if self._awaits_epoch:
            return ()
        missed: list[Event] = []
        if self._epoch is None:
            self._epoch = epoch
        elif epoch > self._epoch:
            self._epoch, self._step = epoch, None
            missed = self._lose_all("the start of an epoch is missing")
        if isinstance(message, StepResult):
            return [*missed, *self._on_result(message)]
        if isinstance(message, RequestState):
            return [*missed, *self._on_state(message)]
        if isinstance(message, ChoiceEnded):
            return [*missed, *self._on_choice_ended(message)]
        if isinstance(message, RequestEnded):
            return [*missed, *self._on_ended(message)]
        raise DecodeError(f"{type(message).__name__} does not belong into outputs")

    def _start_epoch(self, started: EpochStarted) -> None:
        if self._epoch is not None and started.epoch <= self._epoch:
            return
        self._epoch, self._step, self._awaits_epoch = started.epoch, 0, False
        # The new scheduler may know less of the requests log than the one before.
        self.requests_cursor = None
        # Handles are unique within an epoch only; each request's new ones come with its state.
        self._unstated = {choice.request_id for choice in self._by_handle.values()} | {
            request_id for request_id in self._unstated if request_id in self._requests
        }
        for choice in self._by_handle.values():
            choice.handle = None
        self._by_handle.clear()

    def _on_result(self, result: StepResult) -> Iterator[Event]:
        if self._step is not None:
            if result.step <= self._step:
                return
            if result.step > self._step + 1:
                self._step = result.step
                yield from self._lose_all("results are missing in the log")
                return
        self._step = result.step
        # A result counts as a whole or not at all: what could be wrong is looked at first.
        rows = _rows(result)
        admitted = _admitted(result)
        if self._unstated:
            for request_id in self._unstated & self._requests.keys():
                yield self._lost(request_id, "the log has forgotten this request")
            self._unstated.clear()
        if not self._by_handle:
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
            return
        request = self._requests[choice.request_id]
        if not request.was_admitted:
            request.was_admitted = True
            yield PrefixFound(choice.request_id, num_computed)

    def _on_state(self, state: RequestState) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(state.requests_cursor)
        request_id = state.submit.request_id
        known = {choice.choice: choice for choice in state.choices}
        reasons = {
            index: FinishReason(choice.finish_reason) if choice.finish_reason else None
            for index, choice in known.items()
        }
        self._unstated.discard(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return
        if sorted(known) != list(range(len(request.choices))):
            yield self._lost(request_id, "the log has other choices of this request")
            return
        for choice in request.choices:
            self._forget_handle(choice)
        for index, choice in enumerate(request.choices):
            if choice.ended:
                continue
            more = _continuation(choice, known[index])
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

    def _on_ended(self, message: RequestEnded) -> Iterator[Event]:
        self.requests_cursor = EntryId.parse(message.requests_cursor)
        request = self._requests.get(message.request_id)
        if request is None:
            return
        reason = FinishReason(message.reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            for choice in request.choices:
                if not choice.ended:
                    yield self._end(choice, reason)
            return
        if not request.has_ended:
            error = message.error or f"the request ended with {reason.value!r}"
            yield RequestFailed(message.request_id, error, engine_knows=True)
        self.close(message.request_id)

    def _lose_all(self, why: str) -> list[Event]:
        return [self._lost(request_id, why) for request_id in list(self._requests)]

    def _lost(self, request_id: str, why: str) -> Event:
        """The log and what was delivered do not fit together: here a request could attach anew."""
        self.close(request_id)
        return RequestFailed(request_id, f"the stream cannot be continued: {why}", False)

    def _end(self, choice: _Choice, reason: FinishReason) -> Event:
        choice.ended = True
        self._forget_handle(choice)
        return ChoiceFinished(choice.request_id, choice.index, reason)

    def _forget_handle(self, choice: _Choice) -> None:
        if choice.handle is not None:
            self._by_handle.pop(choice.handle, None)
            choice.handle = None


def _continuation(choice: _Choice, known: ChoiceState) -> list[int] | None:
    """Tokens of the log that were not delivered yet, None if the delivered ones differ."""
    output: list[int] = known.output.tolist()
    have = len(choice.tokens)
    if output[:have] != choice.tokens:
        return None
    # Log-probabilities are not part of a state: without them the tokens are not what was asked for.
    return None if choice.scored and len(output) > have else output[have:]


def _rows(result: StepResult) -> list[tuple[int, int, EndFlag | None]]:
    """Handle, token and end of every row."""
    handles, tokens = result.handles.tolist(), result.tokens.tolist()
    flags = [EndFlag(flag) for flag in result.ended_flags.tolist()]
    ended = dict(zip(result.ended_rows.tolist(), flags, strict=True))
    return [
        (handle, token, ended.get(row))
        for row, (handle, token) in enumerate(zip(handles, tokens, strict=True))
    ]


def _admitted(result: StepResult) -> list[tuple[int, int]]:
    """Handle of every admitted sequence, and how many of its tokens needed no computing."""
    handles, computed = result.admitted_handles.tolist(), result.admitted_computed.tolist()
    return list(zip(handles, computed, strict=True))
