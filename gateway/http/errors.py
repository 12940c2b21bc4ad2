"""All errors that clients can get, in OpenAI's format."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic_core import ErrorDetails

from shared.errors import BusUnavailable

MISSING_FIELD = "missing_field"
_SHOWN_VALUE_CHARS = 80
_RETRY_AFTER_S = 2
_WITH_KEY = " with this API key"
STREAM_LOST = "stream_lost"
TAKEN_OVER = "taken_over"
OTHER_BODY = "idempotency_key_reused"
UNKNOWN_MODEL = "model_not_found"
_SHOWN_MODELS = 20
# OpenAI's own clients retry every 409 and 500 without this header.
_FINAL = {"x-should-retry": "false"}

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        param: field of the request that is at fault.
        code: for programs to compare.
        rejection: label of the rejections metric, None if no request was rejected.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        rejection: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.rejection = rejection
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body in OpenAI's format."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request can never succeed."""
    return ApiError(400, message, param=param, code=code, rejection="invalid")


def invalid_value(param: str, value: object, reason: str) -> ApiError:
    """400 that names the field and its value."""
    return invalid(param, f"{param}={shown(value)}: {reason}", "invalid_value")


def too_long(message: str, param: str) -> ApiError:
    """400: more tokens than the model or the KV cache holds."""
    return ApiError(400, message, param=param, code="context_length_exceeded", rejection="too_long")


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404, with OpenAI's message and the models that are served."""
    here = " and ".join(map(repr, served[:_SHOWN_MODELS])) or "no model"
    more = len(served) - _SHOWN_MODELS
    others = f" and {more} others" if more > 0 else ""
    return ApiError(
        404,
        f"The model {shown(name)} does not exist; served here: {here}{others}",
        param="model",
        code=UNKNOWN_MODEL,
        rejection="unknown_model",
    )


def no_embeddings() -> ApiError:
    """404: models here generate text, and no vectors."""
    return ApiError(
        404,
        "The models that are served here generate text: they have no embeddings",
        code="unsupported_endpoint",
        rejection="invalid",
    )


def body_too_large(limit: int) -> ApiError:
    """413; the connection is closed, as the rest of the body is not read."""
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes",
        code="body_too_large",
        rejection="too_large",
        headers={"Connection": "close"},
    )


def file_too_large(limit: int) -> ApiError:
    """413: a file is larger than any may be."""
    return ApiError(
        413,
        f"file: it is larger than {limit} bytes; split it into several",
        param="file",
        code="file_too_large",
        rejection="too_large",
        headers={"Connection": "close"},
    )


def files_full(limit: int) -> ApiError:
    """429: what the files of one API key may keep is full."""
    return ApiError(
        429,
        f"the files and batches of one API key may have {limit} bytes together; delete some files",
        code="files_full",
        rejection="overloaded",
    )


def body_too_complex(kind: str, number: int, limit: int) -> ApiError:
    """400: the body has an allowed size, but would take too long to parse."""
    message = f"The request body has {number} {kind}; at most {limit} are accepted"
    return ApiError(400, message, code="body_too_complex", rejection="too_large")


def unsupported_encoding(name: str) -> ApiError:
    """415: the body is compressed."""
    return ApiError(
        415,
        f"Content-Encoding={shown(name)}: compressed bodies are not read; send it as it is",
        param="Content-Encoding",
        code="unsupported_encoding",
        rejection="invalid",
        headers={"Accept-Encoding": "identity"},
    )


def unavailable(message: str) -> ApiError:
    """503: there is no engine now; the same request may succeed later."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return ApiError(503, message, code="engine_unavailable", rejection="no_engine", headers=headers)


@contextmanager
def bus_errors() -> Iterator[None]:
    """That Redis does not answer is a 503.

    Raises:
        ApiError: 503.
    """
    try:
        yield
    except BusUnavailable as error:
        raise unavailable(f"Redis does not answer: {error}") from error


def unauthorized(given: bool) -> ApiError:
    """401: no API key, or an invalid one."""
    message = "this API key is not known" if given else "an API key is needed"
    return ApiError(
        401,
        f"{message}: send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        rejection="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )


def head_too_large(limit: int) -> ApiError:
    """431: the request was dropped."""
    message = f"The request line and headers are larger than {limit} bytes"
    return ApiError(431, message, code="head_too_large")


def malformed_http(reason: str) -> ApiError:
    """400: the bytes on the connection are no HTTP/1.1 request."""
    message = "This is not a valid HTTP/1.1 request" + (f": {reason}" if reason else "")
    return ApiError(400, message, code="invalid_http")


def other_protocol(name: str) -> ApiError:
    """400: the client asks for a protocol that is not supported."""
    message = f"The connection cannot become {name}: this server speaks HTTP/1.1 alone"
    return ApiError(400, message, code="unsupported_protocol")


def too_slow(limit_s: float) -> ApiError:
    """408: the request did not arrive in time; the rest of it is not read."""
    message = f"The request did not arrive within {limit_s:.3g} seconds"
    headers = {"Connection": "close"}
    return ApiError(408, message, code="request_timeout", headers=headers)


def busy(limit: int) -> ApiError:
    """503: there are too many connections; another gateway may accept some."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    message = f"there are {limit} connections already"
    return ApiError(503, message, code="too_many_connections", headers=headers)


def busy_address(limit: int) -> ApiError:
    """429: the client's address has too many connections, and none is idle."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    message = f"there are {limit} connections from this address already"
    return ApiError(429, message, code="too_many_connections", headers=headers)


def too_many_calls(limit: int, of_key: bool = False) -> ApiError:
    """429: the limit of calls in progress is reached, of this gateway or of the API key."""
    return overloaded(f"{limit} calls{_WITH_KEY * of_key} are in progress already")


def too_many_bytes(limit: int, of_key: bool = False) -> ApiError:
    """429: the limit of bytes in bodies of calls in progress is reached."""
    return overloaded(
        f"the bodies of calls{_WITH_KEY * of_key} in progress may have {limit} bytes together"
    )


def overloaded(message: str) -> ApiError:
    """429: too much is waiting already; the same request may succeed later."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return ApiError(429, message, code="overloaded", rejection="overloaded", headers=headers)


def shutting_down(accepted: bool, resumable: bool = False) -> ApiError:
    """503: another gateway must serve this."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    rejection = None if accepted else "draining"
    return ApiError(
        503,
        "the gateway is shutting down; another one, or the next, takes this up: "
        + ("resume the stream, or " if resumable else "")
        + "send the request again",
        code="shutting_down",
        rejection=rejection,
        headers=headers,
    )


def unknown_stream() -> ApiError:
    """404: there is no such stream."""
    return ApiError(404, "there is no such stream", code="stream_not_found", rejection="invalid")


def gone(message: str) -> ApiError:
    """410: the stream could be continued once, and is forgotten now."""
    return ApiError(410, message, code="stream_gone", rejection="invalid")


def taken_over() -> ApiError:
    """409: a newer call delivers the same generation."""
    message = "a newer call has taken over the delivery of this generation"
    return ApiError(409, message, code=TAKEN_OVER, headers=_FINAL)


def other_body() -> ApiError:
    """422: the Idempotency-Key was used before with another body."""
    return ApiError(
        422,
        "Idempotency-Key: it was used with another body; a key stands for one generation",
        code=OTHER_BODY,
        rejection="invalid",
    )


def failed(message: str, code: str = "generation_failed") -> ApiError:
    """500: an accepted request failed."""
    headers = _FINAL if code == STREAM_LOST else None
    return ApiError(500, message, code=code, headers=headers)


def from_validation(details: ErrorDetails) -> ApiError:
    """The error for a body that is JSON and was refused by pydantic, from its first finding."""
    kind = details["type"]
    param = _path(details)
    if param is None:
        return invalid(None, f"The body must be a JSON object, got {shown(details['input'])}")
    if kind == "missing":
        return invalid(param, f"{param}: this field is required", MISSING_FIELD)
    if kind == "extra_forbidden":
        return unsupported(param, details["input"])
    if kind == "literal_error" and (part := _part_of_message(param)):
        reason = f"{part}: this model takes text only, got a part of type"
        return invalid(part, f"{reason} {shown(details['input'])}", "unsupported_parameter")
    if kind == "too_long":
        return invalid_value(param, details["input"], f"at most {details['ctx']['max_length']}")
    message = details["msg"].removeprefix("Value error, ")
    return invalid_value(param, details["input"], message)


def unsupported(param: str, value: object, reason: str = "") -> ApiError:
    """400: the field, or its value, is not supported."""
    message = f"{param}={shown(value)}: this field is not supported"
    return invalid(param, f"{message}{reason and ': '}{reason}", "unsupported_parameter")


def shown(value: object) -> str:
    """A value for messages, cut if it is long."""
    # repr of a long list or text would be built in full only to be cut.
    if isinstance(value, str):
        text = repr(value[: _SHOWN_VALUE_CHARS + 1])
    elif isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'map'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "..."


def _part_of_message(param: str) -> str | None:
    """Path of the message part whose type field ``param`` is, else None."""
    found = re.fullmatch(r"(messages\[\d+\]\.content\[\d+\])\.type", param)
    return found and found[1]


def _path(details: ErrorDetails) -> str | None:
    parts: list[str] = []
    for part in details["loc"]:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part != "[key]" and not part.startswith("as "):  # names of our own union members
            parts.append(f".{part[:_SHOWN_VALUE_CHARS]}" if parts else part)
    return "".join(parts) or None
