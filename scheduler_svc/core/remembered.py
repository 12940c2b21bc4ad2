"""Requests that have ended: for a while somebody may still ask for them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.codec import IntArray, Message
from shared.messages.outputs import BeamsEnded
from shared.messages.requests import Submit


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """What is left of a choice."""

    output: IntArray
    reason: str  # FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How a request ended.

    Attributes:
        submit: the request, None if it was aborted before it came.
        choices: all of them; empty if it did not end by its choices, or had beams.
        message: what ended it otherwise.
        aborted: attachment of the Abort that came before the request.
    """

    submit: Submit | None
    choices: Mapping[int, EndedChoice]
    message: Message | None
    aborted: str = ""

    @property
    def attachment(self) -> str:
        """The last that it was delivered to."""
        return self.aborted if self.submit is None else self.submit.attachment


class RememberedRequests:
    """Ended requests by id, for a window of time, and never too many.

    Args:
        window_ms: how long each is kept.
        max_requests: the oldest go when there are more.
        max_tokens: or when they hold more tokens than this.
    """

    def __init__(self, window_ms: int, max_requests: int = 10_000, max_tokens: int = 4_000_000):
        self._window_ms = window_ms
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ended: OrderedDict[str, tuple[int, EndedRequest]] = OrderedDict()

    def add(self, request_id: str, ended: EndedRequest, now_ms: int) -> None:
        """A request has ended at this time."""
        self.forget(request_id)
        self._ended[request_id] = (now_ms + self._window_ms, ended)
        self._num_tokens += _num_tokens(ended)
        while len(self._ended) > self._max_requests or self._num_tokens > self._max_tokens:
            self.forget(next(iter(self._ended)))

    def find(self, request_id: str) -> EndedRequest | None:
        """How a request ended, if that was not too long ago."""
        found = self._ended.get(request_id)
        return None if found is None else found[1]

    def deliver(self, submit: Submit) -> None:
        """The end of a remembered request is told to another delivery of it."""
        until_ms, ended = self._ended[submit.request_id]
        told = replace(ended, submit=submit)
        self._ended[submit.request_id] = (until_ms, told)

    def forget(self, request_id: str) -> None:
        """It goes on after all, or is too old."""
        found = self._ended.pop(request_id, None)
        if found is not None:
            self._num_tokens -= _num_tokens(found[1])

    def expire(self, now_ms: int) -> None:
        """Forget what ended too long ago."""
        while self._ended:
            request_id, (until_ms, _) = next(iter(self._ended.items()))
            if until_ms > now_ms:
                return
            self.forget(request_id)


def _num_tokens(ended: EndedRequest) -> int:
    num_prompt = 0 if ended.submit is None else len(ended.submit.prompt)
    num_generated = sum(len(choice.output) for choice in ended.choices.values())
    if isinstance(ended.message, BeamsEnded):
        num_generated += sum(len(found.tokens) for found in ended.message.hypotheses)
    return num_prompt + num_generated
