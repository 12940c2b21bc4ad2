"""One HTTP call: its id, its body, and its line in the access log."""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.networks import address_of, subscriber_of
from gateway.access.priorities import PriorityRange
from gateway.http.errors import body_too_large, invalid, unsupported_encoding
from gateway.tracing.trace_context import TraceContext
from gateway.tracing.tracer import CallSpan, Tracer
from shared.logs import EventLog

_log = EventLog("gateway.access")
_SCOPE_KEY = "pagestream.call"
# Probes and scrapes call these every few seconds.
QUIET_PATHS = ("/health", "/metrics")
MAX_KEY_CHARS = 255
_MESSAGES_PATH = "/v1/messages"
_SHOWN_PATH_CHARS = 200
# Nothing that would need quoting in a header, a log line or a query.
_CLIENTS_ID = re.compile(rb"[A-Za-z0-9._:/@+=-]{1,128}")
_DISCARD_BYTES = 64 * 2**20
_DISCARD_S = 2.0


@dataclass(slots=True)
class Call:
    """A call in progress.

    Attributes:
        id: 128 bits in hex, random unless the client gave an ``Idempotency-Key``; shown in logs
            and, unless the client gave a name, in the ``X-Request-Id`` header.
        clients_id: the client's own name for the call, from its ``X-Request-Id`` header; None if it
            gave none or one that is not kept. It names the call in the answer and in logs alone:
            ids of requests are secrets, and clients cannot choose them.
        trace: the span of the call if it is recorded, or the client's from its ``traceparent``.
        continues: the span of an earlier call, whose stream it continues.
        received_ms: wall clock at its start.
        tenant: name of its API key, "" where none is required.
        priorities: priorities that its API key allows, None where no key is required.
        discards_body: the rest of the body is read and dropped.
        status: of the response, 0 before it starts.
        route: in a fleet, the engine that answers and why, for the ``X-Engine`` header.
        fields: further fields for the access log; never a client's text.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    started_s: float = field(default_factory=time.monotonic)
    received_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    clients_id: str | None = None
    trace: TraceContext | None = None
    continues: TraceContext | None = None
    tenant: str = ""
    priorities: PriorityRange | None = None
    discards_body: bool = False
    status: int = 0
    route: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


def call_of(request: Request) -> Call:
    """The call of a request."""
    return call_in(request.scope)


def call_in(scope: Scope) -> Call:
    """The call of an ASGI scope."""
    return cast(Call, scope[_SCOPE_KEY])


def client_of(request: Request) -> str:
    """Name of the client, "" if it gave none.

    That is the name of its API key, which stays the same when the key is replaced. Where no key is
    required, it is the ``Authorization`` header.
    """
    return call_of(request).tenant or request.headers.get("authorization", "")


def caller_of(request: Request) -> str:
    """Name by which threads are shared: of the API key, or the subscriber if none is required."""
    tenant = call_of(request).tenant
    if tenant or request.client is None:
        return tenant
    address = address_of(request.client.host)
    return request.client.host if address is None else subscriber_of(address)


def idempotency_key(request: Request) -> str | None:
    """The key by which the client may ask for the same generation again.

    Raises:
        ApiError: 400, it is too short or too long.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise invalid(
            "Idempotency-Key",
            f"Idempotency-Key: {len(key)} characters; it must have 1 to {MAX_KEY_CHARS}",
        )
    return key


def is_messages_path(path: str) -> bool:
    """Whether a path is of the Messages API, which has Anthropic's headers and errors."""
    return path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")


def shown_path(scope: Scope) -> str:
    """The path for logs and messages, cut if it is long."""
    path: str = scope["path"]
    return path if len(path) <= _SHOWN_PATH_CHARS else path[:_SHOWN_PATH_CHARS] + "..."


async def read_body(request: Request, limit: int) -> bytes:
    """Read the whole body, of at most ``limit`` bytes.

    Raises:
        ApiError: 413, it is longer; 415, it is compressed.
    """
    chunks: list[bytes] = []
    size = 0
    body = request.stream()
    encoding = request.headers.get("content-encoding", "").strip().lower()
    try:
        if encoding not in ("", "identity"):
            if "expect" not in request.headers:
                await discard(body)
            raise unsupported_encoding(encoding)
        # The HTTP parser accepts digits alone here.
        if int(request.headers.get("content-length", "0")) > limit:
            # A client that sends ``Expect`` gets the error before it sends the body.
            if "expect" not in request.headers:
                call_of(request).discards_body = True
                await discard(body)
            raise body_too_large(limit)
        async for chunk in body:
            size += len(chunk)
            if size > limit:
                chunks.clear()
                call_of(request).discards_body = True
                await discard(body)
                raise body_too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise invalid(None, "the client left before the body was complete") from None
    return b"".join(chunks)


async def discard(body: AsyncIterator[bytes]) -> None:
    """Read the rest of a body for a while and drop it.

    Closing a connection with unread data resets it, and the client would not get the error.
    """
    size = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in body:
                size += len(chunk)
                if size > _DISCARD_BYTES:
                    return
    except TimeoutError:
        return


def _clients_id(scope: Scope) -> str | None:
    """The client's own name for a call, None if there is none, or several, or one of other form."""
    given = [text for name, text in scope["headers"] if name == b"x-request-id"]
    if len(given) != 1 or not _CLIENTS_ID.fullmatch(given[0]):
        return None
    return str(given[0], "ascii")


class AccessLog:
    """Middleware that gives every call an id, and logs one line at its end.

    Args:
        tracer: records a span for it; None: no traces are recorded.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer | None = None) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(clients_id=_clients_id(scope), trace=TraceContext.of(scope["headers"]))
        span = self._begin_span(scope, call)
        scope[_SCOPE_KEY] = call

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                shown_id = (call.clients_id or call.id).encode()
                headers = [*message.get("headers", ()), (b"x-request-id", shown_id)]
                if is_messages_path(scope["path"]):
                    headers.append((b"request-id", shown_id))
                if call.route:
                    headers.append((b"x-engine", call.route.encode()))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        except Exception:
            call.status = 500
            raise
        finally:
            self._write(scope, call)
            if span is not None:
                _end_span(span, scope, call)

    def _begin_span(self, scope: Scope, call: Call) -> CallSpan | None:
        if self._tracer is None or scope["path"].startswith(QUIET_PATHS):
            return None
        span = self._tracer.begin_call(call.trace, scope["method"])
        call.trace = span.context
        return span

    @staticmethod
    def _write(scope: Scope, call: Call) -> None:
        path = shown_path(scope)
        write = _log.debug if path.startswith(QUIET_PATHS) else _log.info
        named = {} if call.clients_id is None else {"client_id": call.clients_id}
        if call.trace is not None:
            named["trace"] = call.trace.trace_id
        write(
            "call",
            id=call.id,
            **named,
            method=scope["method"],
            path=path,
            status=call.status,
            ms=round(1000 * (time.monotonic() - call.started_s), 1),
            **call.fields,
        )


# Fields of the access log that OpenTelemetry has names for.
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "stream": "gen_ai.request.stream",
    "model": "gen_ai.request.model",
}


def _end_span(span: CallSpan, scope: Scope, call: Call) -> None:
    # The path itself may hold a secret, that of a stream.
    route = getattr(scope.get("route"), "path", None)
    attributes: dict[str, Any] = {"pagestream.call_id": call.id}
    if route is not None:
        attributes["http.route"] = route
    if call.continues is not None:
        span.link(call.continues)
    for name, value in call.fields.items():
        attributes[_ATTRIBUTES.get(name, f"pagestream.{name}")] = (
            value if isinstance(value, (bool, int, float)) else str(value)
        )
    if call.clients_id is not None:
        attributes["pagestream.client_id"] = call.clients_id
    failed = call.status >= 500 or (call.status == 200 and "error" in call.fields)
    error = str(call.fields.get("error", f"status {call.status}")) if failed else ""
    name = scope["method"] if route is None else f"{scope['method']} {route}"
    span.end(name, call.status, attributes, error)
