"""The unfinished requests, read back from the outputs log.

The log is the only memory of the engine: a RequestState says all of a request, StepResults carry
it on, a flag or a RequestEnded closes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.sequence import EndedChoice
from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages import (
    ChoiceEnded,
    EndFlag,
    EpochStarted,
    RequestEnded,
    RequestState,
    StepResult,
    Submit,
)


@dataclass(slots=True)
class UnfinishedChoice:
    """One choice with the tokens that the log holds of it."""

    request: "Unfinished"
    choice: int
    handle: int
    output: list[int]


@dataclass(slots=True)
class Unfinished:
    """A request of which at least one choice has not ended."""

    submit: Submit
    choices: dict[int, UnfinishedChoice] = field(default_factory=dict)
    ended: dict[int, EndedChoice] = field(default_factory=dict)

    def outputs(self) -> dict[int, IntArray]:
        """Tokens of the choices that go on."""
        return {number: np.array(found.output, np.int32) for number, found in self.choices.items()}


@dataclass(slots=True)
class Fold:
    """Reads entries of ``outputs`` in order; ``unfinished`` is the result."""

    unfinished: dict[str, Unfinished] = field(default_factory=dict)
    requests_cursor: EntryId = START
    _by_handle: dict[int, UnfinishedChoice] = field(default_factory=dict)
    _last_step: int | None = None

    def add(self, messages: Iterable[Message]) -> None:
        """Take in the messages of the next entry."""
        for message in messages:
            match message:
                case EpochStarted():
                    self._by_handle.clear()
                    self._last_step = 0
                case RequestState():
                    self._restate(message)
                case StepResult():
                    self._continue(message)
                case ChoiceEnded():
                    self._advance(message.requests_cursor)
                    self._end_choice(message.request_id, message.choice, message.reason)
                case RequestEnded():
                    self._advance(message.requests_cursor)
                    self._forget(message.request_id)

    def lose_sight(self) -> None:
        """An entry could not be read: tokens behind it would not join those before it."""
        self._by_handle.clear()

    def in_order(self) -> list[Unfinished]:
        """Unfinished requests, earliest first."""
        return sorted(
            self.unfinished.values(), key=lambda u: (u.submit.received_ms, u.submit.request_id)
        )

    def _restate(self, state: RequestState) -> None:
        self._advance(state.requests_cursor)
        self._forget(state.submit.request_id)
        request = Unfinished(state.submit)
        for known in state.choices:
            if known.finish_reason:
                request.ended[known.choice] = EndedChoice(known.output, known.finish_reason)
                continue
            choice = UnfinishedChoice(request, known.choice, known.handle, known.output.tolist())
            request.choices[known.choice] = choice
            self._by_handle[known.handle] = choice
        self.unfinished[state.submit.request_id] = request

    def _continue(self, result: StepResult) -> None:
        if self._last_step is not None and result.step <= self._last_step:
            return
        # Behind the log's trimmed beginning any step may be the first.
        if self._last_step is not None and result.step != self._last_step + 1:
            self.lose_sight()
        self._last_step = result.step
        handles = result.handles.tolist()
        for handle, token in zip(handles, result.tokens.tolist(), strict=True):
            if (choice := self._by_handle.get(handle)) is not None:
                choice.output.append(token)
        ended = zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=True)
        for row, flag in ended:
            if (choice := self._by_handle.get(handles[row])) is not None:
                reason = EndFlag(flag).finish_reason()
                self._end_choice(choice.request.submit.request_id, choice.choice, reason)

    def _end_choice(self, request_id: str, number: int, reason: str) -> None:
        request = self.unfinished.get(request_id)
        choice = None if request is None else request.choices.pop(number, None)
        if request is None or choice is None:
            return
        self._by_handle.pop(choice.handle, None)
        request.ended[number] = EndedChoice(np.array(choice.output, np.int32), reason)
        if not request.choices:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        request = self.unfinished.pop(request_id, None)
        if request is not None:
            for choice in request.choices.values():
                self._by_handle.pop(choice.handle, None)

    def _advance(self, cursor: str) -> None:
        self.requests_cursor = max(self.requests_cursor, EntryId.parse(cursor))
