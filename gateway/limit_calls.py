"""Refuses calls before anything is done for them: beyond a limit, and while the engine is full."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.call import QUIET_PATHS, call_in
from gateway.errors import ApiError, overloaded, too_many_calls
from shared.metrics import GatewayMetrics


class LimitCalls:
    """Refuses what is too much before its body is read. Probes and scrapes do not count.

    Args:
        limit: calls in progress at most.
        is_full: the engine would refuse whatever is new.
    """

    def __init__(
        self, app: ASGIApp, limit: int, is_full: Callable[[], bool], metrics: GatewayMetrics
    ) -> None:
        self._app = app
        self._limit = limit
        self._is_full = is_full
        self._metrics = metrics
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(QUIET_PATHS):
            await self._app(scope, receive, send)
            return
        error = self._why_not(scope)
        if error is not None:
            self._metrics.admission_rejections["overloaded"].inc()
            call_in(scope).fields["error"] = error.code
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, send)
            return
        self._num_calls += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_calls -= 1

    def _why_not(self, scope: Scope) -> ApiError | None:
        if self._num_calls >= self._limit:
            return too_many_calls(self._limit)
        if not self._is_full() or not scope["path"].endswith("/completions"):
            return None
        # Who names a generation may want one that is there already.
        is_named = "idempotency-key" in Headers(scope=scope)
        return None if is_named else overloaded("the engine's queue is full")
