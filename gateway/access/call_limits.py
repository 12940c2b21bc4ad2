"""Refuses calls early: beyond limits on calls and bodies, and while the engine's queue is full.

Calls and the bytes of their bodies are counted for all callers together and for each API key, from
a call's beginning until its answer is sent. A call whose body does not arrive is ended as soon as
another call needs its place.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.quota import Quota
from gateway.http.call import QUIET_PATHS, Call, call_in
from gateway.http.errors import ApiError, overloaded, too_many_bytes, too_many_calls, too_slow
from gateway.http.other_errors import error_response
from shared.metrics import GatewayMetrics

TOKEN_PATHS = ("/tokenize", "/detokenize")
FILES_PATH = "/v1/files"  # its bodies are written while they arrive, and never held
_GRACE_S = 5.0  # for a body to arrive, even if another call needs the place


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits on all calls in progress together.

    Attributes:
        max_body_bytes: of one call.
        max_total_body_bytes: of all calls except tokenize and detokenize.
        max_total_token_bytes: of all calls that tokenize and detokenize.
        max_key_share: part of these limits for one API key while there are others.
        body_timeout_s: for a body to arrive.
    """

    max_calls: int
    max_body_bytes: int
    max_total_body_bytes: int
    max_total_token_bytes: int
    max_key_share: float
    body_timeout_s: float


class CallQuotas:
    """What calls in progress hold of the limits."""

    def __init__(self, limits: CallLimits) -> None:
        share = limits.max_key_share
        self.body_timeout_s = limits.body_timeout_s
        self.calls = Quota(limits.max_calls, max(1, int(limits.max_calls * share)))
        # Every key may send one body of the largest size.
        largest = limits.max_body_bytes
        body_bytes, token_bytes = limits.max_total_body_bytes, limits.max_total_token_bytes
        self.body_bytes = Quota(body_bytes, max(largest, int(body_bytes * share)))
        self.token_bytes = Quota(token_bytes, max(largest, int(token_bytes * share)))


class _Running:
    """One call in progress."""

    __slots__ = (
        *("arrival", "bytes", "caller", "deadline_s", "has_place", "is_streamed", "num_bytes"),
        "started_s",
    )

    def __init__(
        self,
        caller: str,
        num_bytes: Quota,
        started_s: float,
        deadline_s: float,
        is_streamed: bool,
    ) -> None:
        self.caller = caller
        self.is_streamed = is_streamed
        self.bytes = num_bytes  # the quota that its body counts for
        self.num_bytes = 0
        self.started_s = started_s
        self.deadline_s = deadline_s  # for its body
        self.arrival: asyncio.Timeout | None = None
        self.has_place = True

    def goes_on(self, timeout_s: float) -> None:
        """A part of its body has come; the next may take as long again."""
        if self.has_place:
            self.deadline_s = asyncio.get_running_loop().time() + timeout_s

    def expire(self, now_s: float) -> None:
        """Stop waiting for its body."""
        self.deadline_s = now_s
        if self.arrival is not None:
            self.arrival.reschedule(now_s)


class LimitCalls:
    """Middleware that refuses calls beyond the limits before their bodies are read.

    Probes and scrapes do not count.

    Args:
        is_shared: whether there are several API keys, each with its share.
        is_full: whether the engine would refuse any new request.
    """

    def __init__(
        self,
        app: ASGIApp,
        quotas: CallQuotas,
        is_shared: Callable[[], bool],
        is_full: Callable[[], bool],
        metrics: GatewayMetrics,
    ) -> None:
        self._app = app
        self._is_shared = is_shared
        self._is_full = is_full
        self._metrics = metrics
        self._quotas = quotas
        self._calls = quotas.calls
        self._arriving: dict[_Running, None] = {}  # whose bodies are not complete; oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(QUIET_PATHS):
            await self._app(scope, receive, send)
            return
        caller = call_in(scope).tenant
        quotas = self._quotas
        num_bytes = quotas.token_bytes if scope["path"] in TOKEN_PATHS else quotas.body_bytes
        error = self._why_not(scope, caller, num_bytes)
        if error is not None:
            self._metrics.admission_rejections["overloaded"].inc()
            call_in(scope).fields["error"] = error.code
            response = error_response(scope, error)
            await response(scope, receive, send)
            return
        now_s = asyncio.get_running_loop().time()
        is_streamed = scope["path"] == FILES_PATH
        deadline_s = now_s + quotas.body_timeout_s
        running = _Running(caller, num_bytes, now_s, deadline_s, is_streamed)
        self._calls.take(caller, 1)
        self._arriving[running] = None
        try:
            await self._app(scope, self._counting(call_in(scope), running, receive), send)
        finally:
            self._arriving.pop(running, None)
            self._release_place(running)
            running.bytes.release(caller, running.num_bytes)

    def _counting(self, call: Call, running: _Running, receive: Receive) -> Receive:
        """A ``receive`` that counts the bytes of the body and limits the time it may take."""

        async def receive_counting() -> Message:
            if running not in self._arriving:
                return await receive()
            try:
                async with asyncio.timeout_at(running.deadline_s) as running.arrival:
                    message = await receive()
            except TimeoutError:
                now_s = asyncio.get_running_loop().time()
                raise too_slow(now_s - running.started_s) from None
            finally:
                running.arrival = None
            if running.is_streamed:  # however long it is, if it goes on
                running.goes_on(self._quotas.body_timeout_s)
            is_held = not (call.discards_body or running.is_streamed)
            num_bytes = len(message.get("body", b"")) if is_held else 0
            error = self._why_no_bytes(running.caller, running.bytes, num_bytes)
            if error is not None:
                raise error
            running.bytes.take(running.caller, num_bytes)
            running.num_bytes += num_bytes
            if not message.get("more_body", False):
                self._arriving.pop(running, None)
            return message

        return receive_counting

    def _why_not(self, scope: Scope, caller: str, num_bytes: Quota) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._is_limited(caller) and self._calls.is_exhausted_for(caller, 1):
            if not self._make_place(caller):
                return too_many_calls(self._calls.most, of_key=True)
        elif self._calls.is_exhausted(1) and not self._make_place(None):
            return too_many_calls(self._calls.total)
        # The HTTP parser accepts digits alone here.
        is_held = scope["path"] != FILES_PATH
        expected = int(headers.get("content-length", "0")) if is_held else 0
        # A body larger than the whole quota is refused later, as too large.
        error = self._why_no_bytes(caller, num_bytes, min(expected, num_bytes.most))
        if error is not None:
            return error
        if not self._is_full() or not scope["path"].endswith("/completions"):
            return None
        # With a key the client may ask for a generation that exists already.
        return None if "idempotency-key" in headers else overloaded("the engine's queue is full")

    def _why_no_bytes(self, caller: str, num_bytes: Quota, wanted: int) -> ApiError | None:
        if self._is_limited(caller) and num_bytes.is_exhausted_for(caller, wanted):
            return too_many_bytes(num_bytes.most, of_key=True)
        return too_many_bytes(num_bytes.total) if num_bytes.is_exhausted(wanted) else None

    def _is_limited(self, caller: str) -> bool:
        return bool(caller) and self._is_shared()

    def _make_place(self, caller: str | None) -> bool:
        """End the oldest call whose body is overdue, of one caller or of any."""
        now_s = asyncio.get_running_loop().time()
        for running in self._arriving:
            if now_s - running.started_s < _GRACE_S:
                return False  # all that follow are younger
            if running.has_place and caller in (None, running.caller):
                self._release_place(running)
                running.expire(now_s)
                return True
        return False

    def _release_place(self, running: _Running) -> None:
        if running.has_place:
            running.has_place = False
            self._calls.release(running.caller, 1)
