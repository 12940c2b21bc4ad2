"""Requests that have ended: for a while a client may still ask for them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from shared.codec import IntArray, Message
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, RequestEnded
from shared.messages.requests import Submit

FAILURES: Final = (FinishReason.ABORT, FinishReason.ERROR)
_LEAST_TOKENS = 400  # what a request takes beside its tokens is worth about as many
_CLEAN_AT = 1_024  # entries that may be out of date
_NO_TOKENS: IntArray = np.empty(0, np.int32)


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
    def tenant(self) -> str:
        """Whose request it was, "" if that is not known."""
        return "" if self.submit is None else self.submit.tenant

    @property
    def attachment(self) -> str:
        """The last that it was delivered to."""
        return self.aborted if self.submit is None else self.submit.attachment


class RememberedRequests:
    """Ended requests by id, for a window of time, and never too many.

    When they are too many, the tenant that has most loses its oldest first: however much one sends,
    what others have is remembered as long as it is no more than their share.

    Args:
        window_ms: how long each is kept.
        max_tokens: that all hold; each request counts as many as it holds, but no fewer than
            ``_LEAST_TOKENS``.
    """

    def __init__(self, window_ms: int, max_tokens: int = 4_000_000):
        self._window_ms = window_ms
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ended: OrderedDict[str, tuple[int, EndedRequest]] = OrderedDict()
        self._by_tenant: dict[str, _Share] = {}
        # Tenants by what they have, most first; an entry may be out of date.
        self._largest: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, request_id: str, ended: EndedRequest, now_ms: int) -> None:
        """A request has ended at this time."""
        self.forget(request_id)
        ended = _without_prompt(ended)
        self._ended[request_id] = (now_ms + self._window_ms, ended)
        share = self._by_tenant.setdefault(ended.tenant, _Share())
        share.requests[request_id] = None
        self._count(ended, share, _num_tokens(ended))
        while self._num_tokens > self._max_tokens:
            self.forget(self._oldest_of_largest())

    def find(self, request_id: str) -> EndedRequest | None:
        """How a request ended, if that was not too long ago."""
        found = self._ended.get(request_id)
        return None if found is None else found[1]

    def items(self) -> list[tuple[str, EndedRequest]]:
        """All of them, by id, the oldest first."""
        return [(request_id, ended) for request_id, (_, ended) in self._ended.items()]

    def deliver(self, submit: Submit) -> None:
        """The end of a remembered request is told to another delivery of it."""
        until_ms, ended = self._ended[submit.request_id]
        told = replace(ended, submit=submit)
        assert told.tenant == ended.tenant, f"{submit.request_id} changes its tenant"
        self._ended[submit.request_id] = (until_ms, told)

    def forget(self, request_id: str) -> None:
        """It goes on after all, or is too old."""
        found = self._ended.pop(request_id, None)
        if found is None:
            return
        ended = found[1]
        share = self._by_tenant[ended.tenant]
        del share.requests[request_id]
        self._count(ended, share, -_num_tokens(ended))
        if not share.requests:
            del self._by_tenant[ended.tenant]

    def expire(self, now_ms: int) -> None:
        """Forget what ended too long ago."""
        while self._ended:
            request_id, (until_ms, _) = next(iter(self._ended.items()))
            if until_ms > now_ms:
                return
            self.forget(request_id)

    def _count(self, ended: EndedRequest, share: "_Share", num_tokens: int) -> None:
        self._num_tokens += num_tokens
        share.num_tokens += num_tokens
        if num_tokens > 0:
            heappush(self._largest, (-share.num_tokens, ended.tenant))
            if len(self._largest) > _CLEAN_AT + 4 * len(self._by_tenant):
                self._largest = [(-one.num_tokens, name) for name, one in self._by_tenant.items()]
                heapify(self._largest)

    def _oldest_of_largest(self) -> str:
        """The request to forget."""
        while True:
            negative, tenant = self._largest[0]
            share = self._by_tenant.get(tenant)
            if share is not None and share.num_tokens == -negative:
                return next(iter(share.requests))
            heappop(self._largest)
            if share is not None and share.num_tokens < -negative:
                heappush(self._largest, (-share.num_tokens, tenant))


@dataclass(slots=True)
class _Share:
    """What is remembered of one tenant's requests."""

    num_tokens: int = 0
    requests: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the oldest first


def _without_prompt(ended: EndedRequest) -> EndedRequest:
    """Whoever asks for a request that failed is told that, and never its prompt."""
    failed = isinstance(ended.message, RequestEnded) and ended.message.reason in FAILURES
    if not failed or ended.submit is None:
        return ended
    bare = replace(ended.submit, prompt=_NO_TOKENS, display=b"")
    return replace(ended, submit=bare)


def _num_tokens(ended: EndedRequest) -> int:
    num_prompt = 0 if ended.submit is None else len(ended.submit.prompt)
    num_generated = sum(len(choice.output) for choice in ended.choices.values())
    if isinstance(ended.message, BeamsEnded):
        num_generated += sum(len(found.tokens) for found in ended.message.hypotheses)
    return max(num_prompt + num_generated, _LEAST_TOKENS)
