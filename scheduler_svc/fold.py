"""The unfinished requests, read back from the outputs log.

The log is the only memory of the engine: a RequestState says all of a request, StepResults carry
it on, a flag or a RequestEnded closes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shared.bus.api import START, EntryId
from shared.codec import IntArray, Message
from shared.messages import EpochStarted, RequestEnded, RequestState, StepResult, Submit


@dataclass(slots=True)
class Unfinished:
    """A request with the tokens that the log holds of it."""

    submit: Submit
    handle: int
    output: list[int]


@dataclass(slots=True)
class Fold:
    """Reads entries of ``outputs`` in order; ``unfinished`` is the result."""

    unfinished: dict[str, Unfinished] = field(default_factory=dict)
    requests_cursor: EntryId = START
    _by_handle: dict[int, Unfinished] = field(default_factory=dict)
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
                case RequestEnded():
                    self._advance(message.requests_cursor)
                    self._forget(message.request_id)

    def lose_sight(self) -> None:
        """An entry could not be read: tokens behind it would not join those before it."""
        self._by_handle.clear()

    def in_order(self) -> list[tuple[Submit, IntArray]]:
        """Unfinished requests, earliest first."""
        found = sorted(
            self.unfinished.values(), key=lambda u: (u.submit.received_ms, u.submit.request_id)
        )
        return [(request.submit, np.array(request.output, np.int32)) for request in found]

    def _restate(self, state: RequestState) -> None:
        self._advance(state.requests_cursor)
        self._forget(state.submit.request_id)
        [choice] = state.choices
        request = Unfinished(state.submit, choice.handle, choice.output.tolist())
        self.unfinished[state.submit.request_id] = request
        self._by_handle[choice.handle] = request

    def _continue(self, result: StepResult) -> None:
        if self._last_step is not None and result.step <= self._last_step:
            return
        # Behind the log's trimmed beginning any step may be the first.
        if self._last_step is not None and result.step != self._last_step + 1:
            self.lose_sight()
        self._last_step = result.step
        handles = result.handles.tolist()
        for handle, token in zip(handles, result.tokens.tolist(), strict=True):
            if (request := self._by_handle.get(handle)) is not None:
                request.output.append(token)
        for row in result.ended_rows.tolist():
            if (request := self._by_handle.get(handles[row])) is not None:
                self._forget(request.submit.request_id)

    def _forget(self, request_id: str) -> None:
        request = self.unfinished.pop(request_id, None)
        if request is not None:
            self._by_handle.pop(request.handle, None)

    def _advance(self, cursor: str) -> None:
        self.requests_cursor = max(self.requests_cursor, EntryId.parse(cursor))
