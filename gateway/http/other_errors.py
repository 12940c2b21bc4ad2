"""Errors of endpoints that have another format than OpenAI's."""

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from gateway.http.call import call_in, is_messages_path
from gateway.http.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# By the field that is refused: with these, Anthropic's clients go on without it.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """The response of a call that failed, in the format of its endpoint."""
    if is_messages_path(scope["path"]):
        return JSONResponse(messages_error(error, call_in(scope).id), error.status, error.headers)
    return JSONResponse(error.body(), error.status, error.headers)


def messages_error(error: ApiError, call_id: str) -> dict[str, Any]:
    """An error in Anthropic's format."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, fallback)
    shown: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.param in _DETAILS:
        shown["details"] = _DETAILS[error.param]
    return {"type": "error", "error": shown, "request_id": call_id}
