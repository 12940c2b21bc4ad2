"""Requests that have ended, remembered for a while for clients that attach again."""

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
_LEAST_TOKENS = 400  # memory of a request beside its tokens, in tokens
_CLEAN_AT = 1_024  # entries that may be out of date
_NO_TOKENS: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """Output of a choice that has ended."""

    output: IntArray
    reason: str  # FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How a request ended.

    Attributes:
        submit: the request, None if it was aborted before its Submit came.
        choices: all choices; empty if it did not end by its choices, or had beams.
        message: the message that ended it otherwise.
        aborted: attachment of an Abort that came before the Submit.
    """

    submit: Submit | None
    choices: Mapping[int, EndedChoice]
    message: Message | None
    aborted: str = ""

    @property
    def tenant(self) -> str:
        """Tenant of the request, "" if it is not known."""
        return "" if self.submit is None else self.submit.tenant

    @property
    def attachment(self) -> str:
        """The last attachment that delivered it."""
        return self.aborted if self.submit is None else self.submit.attachment


class RememberedRequests:
    """Ended requests by id, for a window of time, up to a number of tokens.

    Beyond that number, the tenant with the most tokens loses its oldest requests first: however
    much one tenant sends, others' requests are remembered up to their equal share.

    Args:
        window_ms: how long each is kept.
        max_tokens: of all requests together; each counts ``_LEAST_TOKENS`` at least.
    """

    def __init__(self, window_ms: int, max_tokens: int = 4_000_000):
        self._window_ms = window_ms
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ended: OrderedDict[str, tuple[int, EndedRequest]] = OrderedDict()
        self._by_tenant: dict[str, _Share] = {}
        # A heap of tenants by their tokens, most first; an entry may be out of date.
        self._largest: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, request_id: str, ended: EndedRequest, now_ms: int) -> None:
        """Remember a request that ended at this time."""
        self.forget(request_id)
        ended = _without_prompt(ended)
        self._ended[request_id] = (now_ms + self._window_ms, ended)
        share = self._by_tenant.setdefault(ended.tenant, _Share())
        share.requests[request_id] = None
        self._count(ended, share, _num_tokens(ended))
        while self._num_tokens > self._max_tokens:
            self.forget(self._oldest_of_largest())

    def find(self, request_id: str) -> EndedRequest | None:
        """How a request ended, None if it is not remembered."""
        found = self._ended.get(request_id)
        return None if found is None else found[1]

    def items(self) -> list[tuple[str, EndedRequest]]:
        """All of them, by id, the oldest first."""
        return [(request_id, ended) for request_id, (_, ended) in self._ended.items()]

    def deliver(self, submit: Submit) -> None:
        """Store a remembered request with its new delivery."""
        until_ms, ended = self._ended[submit.request_id]
        delivered = replace(ended, submit=submit)
        assert delivered.tenant == ended.tenant, f"{submit.request_id} changes its tenant"
        self._ended[submit.request_id] = (until_ms, delivered)

    def forget(self, request_id: str) -> None:
        """Forget a request, if it is remembered: it continues, or is too old."""
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
        """Forget requests that ended too long ago."""
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
        """The oldest request of the tenant that has most tokens."""
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
    """Remembered requests of one tenant."""

    num_tokens: int = 0
    requests: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the oldest first


def _without_prompt(ended: EndedRequest) -> EndedRequest:
    """Drop the prompt of a failed request: answers about it contain only the failure."""
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
