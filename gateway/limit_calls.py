"""Keeps the number of calls in progress below a limit."""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.call import QUIET_PATHS, call_in
from gateway.errors import too_many_calls
from shared.metrics import GatewayMetrics


class LimitCalls:
    """Refuses what is too much before its body is read. Probes and scrapes do not count."""

    def __init__(self, app: ASGIApp, limit: int, metrics: GatewayMetrics) -> None:
        self._app = app
        self._limit = limit
        self._metrics = metrics
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(QUIET_PATHS):
            await self._app(scope, receive, send)
            return
        if self._num_calls >= self._limit:
            self._metrics.admission_rejections["overloaded"].inc()
            error = too_many_calls(self._limit)
            call_in(scope).fields["error"] = error.code
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, send)
            return
        self._num_calls += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_calls -= 1
