"""Refuses calls without an API key, except for probes of health, /docs and the page."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.api_keys import ApiKeys
from gateway.http.call import call_in
from gateway.http.errors import unauthorized
from gateway.http.other_errors import error_response
from gateway.openai.endpoints.api_docs import DOCS_PATH
from gateway.ui.page import UI_PATHS
from shared.metrics import GatewayMetrics

_METRICS_PATH = "/metrics"
OPEN_PATHS = ("/health", "/health/live", DOCS_PATH, *UI_PATHS)


class RequireKey:
    """Middleware that checks the API key of a call and sets its tenant; runs inside AccessLog.

    Args:
        metrics_keys: required for /metrics instead of clients' keys, if there are any.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, metrics_keys: ApiKeys, metrics: GatewayMetrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics_keys = metrics_keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys, is_client = self._keys, True
        if scope.get("path") == _METRICS_PATH and self._metrics_keys.are_required:
            keys, is_client = self._metrics_keys, False
        if scope["type"] == "http" and keys.are_required:
            given = _given_key(Headers(scope=scope))
            key = keys.key_of(given)
            if key is not None:
                if is_client:
                    call = call_in(scope)
                    call.tenant = call.fields["key"] = key.tenant
                    call.priorities = key.priorities
            elif scope["path"] not in OPEN_PATHS:
                self._metrics.admission_rejections["unauthorized"].inc()
                error = unauthorized(bool(given))
                await error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given_key(headers: Headers) -> str:
    """The key as ``Authorization`` has it; clients of Anthropic's send another header."""
    other = headers.get("x-api-key")
    return headers.get("authorization", "" if other is None else f"Bearer {other}")
