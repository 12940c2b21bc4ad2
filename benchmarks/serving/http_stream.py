"""An HTTP client for streamed answers that takes little CPU time from the measured services.

An answer is stored as raw bytes, with the arrival time of each event. It is parsed only after the
measurement.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.serving.event_splitter import EventSplitter
from shared.errors import PageStreamError

_SHOWN_BYTES = 500


class StreamFailed(PageStreamError):
    """A server answered wrongly."""


@dataclass(slots=True)
class RawAnswer:
    """One streamed answer.

    Attributes:
        sent_s: when the request was handed to the operating system. All times are of one monotonic
            clock.
        events: arrival time and data of each event.
        ended_s: when the last byte arrived.
        retry_after_s: from the header of a refusal; None if there is none.
        engine: of a fleet, and why it was chosen; empty without that header.
    """

    sent_s: float
    status: int = 0
    body: bytes = b""  # of an answer that is no stream
    events: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    retry_after_s: int | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, and the path of requests."""

    host: str
    port: int
    path: str
    headers: bytes

    @staticmethod
    def of(base_url: str, path: str, api_key: str | None) -> "Target":
        """The target for a path on a server.

        Raises:
            StreamFailed: the URL cannot be used.
        """
        parts = urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise StreamFailed(f"--base-url={base_url!r}: expected http://host:port")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        port = parts.port or 80
        headers = f"Host: {parts.hostname}:{port}\r\n{key}".encode("ascii")
        return Target(parts.hostname, port, parts.path.rstrip("/") + path, headers)

    def request(self, body: dict[str, Any] | None) -> bytes:
        """The bytes of a POST of JSON, or of a GET; the server closes the connection."""
        method, content, kind = "GET", b"", b""
        if body is not None:
            method, content = "POST", json.dumps(body).encode("ascii")
            length = f"Content-Length: {len(content)}\r\n".encode("ascii")
            kind = b"Content-Type: application/json\r\n" + length
        line = f"{method} {self.path} HTTP/1.1\r\n".encode("ascii")
        return line + self.headers + kind + b"Connection: close\r\n\r\n" + content


class _Exchange(asyncio.Protocol):
    """One request on one connection. The parser calls the methods with ``on_``."""

    def __init__(self, request: bytes, done: asyncio.Future[RawAnswer]) -> None:
        self._request = request
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._splitter = EventSplitter()
        self._is_stream = False
        self._ends_with_connection = True
        self._answer = RawAnswer(0.0)
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._answer.sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._answer.status and self._ends_with_connection:
            self.on_message_complete()
        self._fail(f"the connection ended before the answer did ({exc or 'closed'})")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        if name == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        if name == b"retry-after" and value.isdigit():
            self._answer.retry_after_s = int(value)
        if name == b"x-engine":
            self._answer.engine = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self._answer.body += body
            return
        now = time.perf_counter()
        for event in self._splitter.feed(body):
            self._answer.events.append((now, event))

    def on_message_complete(self) -> None:
        self._answer.ended_s = time.perf_counter()
        if not self._done.done():
            self._done.set_result(self._answer)
        if self._transport is not None:
            self._transport.close()

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(StreamFailed(why))
        if self._transport is not None:
            self._transport.close()


async def exchange(target: Target, body: dict[str, Any] | None) -> RawAnswer:
    """Send one request and wait for the end of its answer, with any status.

    Raises:
        StreamFailed: the answer is missing or incomplete.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[RawAnswer] = loop.create_future()
    request = target.request(body)
    try:
        await loop.create_connection(lambda: _Exchange(request, done), target.host, target.port)
    except OSError as error:
        raise StreamFailed(f"{target.host}:{target.port} cannot be reached: {error}") from None
    return await done


async def ask(target: Target, body: dict[str, Any] | None) -> RawAnswer:
    """Send one request, and wait for the end of its answer, which must succeed.

    Raises:
        StreamFailed: there is no answer, or its status is not 200.
    """
    answer = await exchange(target, body)
    if answer.status != 200:
        shown = answer.body[:_SHOWN_BYTES].decode(errors="replace")
        raise StreamFailed(f"{target.path}: status {answer.status}: {shown}")
    return answer
