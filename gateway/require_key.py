"""Lets nobody in without an API key, except to ask whether the process lives, and for /docs."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_docs import DOCS_PATH
from gateway.api_keys import ApiKeys
from gateway.call import call_in
from gateway.errors import unauthorized
from shared.metrics import GatewayMetrics

OPEN_PATHS = ("/health", "/health/live", DOCS_PATH)


class RequireKey:
    """Knows from here on whose call it is; stands inside the AccessLog."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.are_asked_for:
            given = Headers(scope=scope).get("authorization", "")
            tenant = self._keys.tenant_of(given)
            if tenant is not None:
                call_in(scope).tenant = tenant
                call_in(scope).fields["key"] = tenant
            elif scope["path"] not in OPEN_PATHS:
                self._metrics.admission_rejections["unauthorized"].inc()
                error = unauthorized(bool(given))
                response = JSONResponse(error.body(), error.status, error.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
