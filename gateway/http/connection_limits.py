"""Limits the number of connections, and the memory and time that each may take.

uvicorn limits the memory of bodies (it stops reading if the application does) and of answers (it
stops writing if the client does not read). It limits neither heads, nor the number of connections,
nor the time that a request takes to arrive.
"""

import asyncio
import json
import resource
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from gateway.http.connection_table import ConnectionTable
from gateway.http.errors import ApiError, head_too_large, too_slow
from gateway.http.http1_connection import HttpConnection
from shared.errors import SettingsError
from shared.logs import EventLog

_log = EventLog("gateway.http.connection_limits")

_OTHER_FILES = 128  # open files for libraries, the tokenizer, Redis and logs
_FEWEST = 16
# Chunked encoding can need more bytes than it carries: "1\r\nx\r\n".
_FRAMING_PER_BODY_BYTE = 8
_HEADER_FRAMING = len(": \r\n")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits for one connection, one address, and all together.

    Attributes:
        max_address_connections: from one address, unless it is a trusted proxy's.
        trusted_proxies: addresses and networks, separated by commas.
        max_head_bytes: of the request line and the headers of one request.
        idle_timeout_s: until the first request of a connection begins.
        request_timeout_s: from the first byte of a request to its last.
        write_timeout_s: for which a client may leave full buffers unread.
    """

    max_connections: int
    max_address_connections: int
    trusted_proxies: str
    max_head_bytes: int
    idle_timeout_s: float
    request_timeout_s: float
    write_timeout_s: float


class _Refused(Exception):
    """Stops the parser."""


class BoundedHttp(HttpConnection):
    """One connection, within limits."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits, table: ConnectionTable, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._table = table
        self._arrival: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._framing_bytes = 0  # of the current request: all that is not its body
        self._body_bytes = 0
        self._head_bytes = 0  # of the current request, trailers included, as far as parsed
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        error = self._table.add(self, None if self.client is None else self.client[0])
        if error is not None:
            self.refuse(error)
            return
        self._arrival = self.loop.call_later(self._limits.idle_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        body_before = self._body_bytes
        self._completes = False
        super().data_received(data)
        if self._arrival is None and not self._is_answering and not self.transport.is_closing():
            # No request has begun, but uvicorn has cancelled the timeout.
            self._arrival = self.loop.call_later(self._limits.idle_timeout_s, self.transport.close)
        if self._completes:  # the rest of the data belongs to the next request
            self._framing_bytes = 0
            return
        self._framing_bytes += len(data) - (self._body_bytes - body_before)
        allowed = self._limits.max_head_bytes + _FRAMING_PER_BODY_BYTE * self._body_bytes
        if self._framing_bytes > allowed and not self.transport.is_closing():
            self.refuse(head_too_large(self._limits.max_head_bytes))

    def on_message_begin(self) -> None:
        self._stop_waiting()
        self._arrival = self.loop.call_later(
            self._limits.request_timeout_s, self._on_request_timeout
        )
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_to_head(len(name) + len(value) + _HEADER_FRAMING)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = self._upgrades  # the head is parsed again without its upgrade
        if not self._in_head:
            self._table.set_busy(self)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._body_bytes = 0
        self._completes = True
        self._in_head = True  # of the next one
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._table.set_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._limits.write_timeout_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().resume_writing()

    def evict(self) -> None:
        _log.debug("idle connection closed for another", client=self.client)
        if (
            self.transport.get_write_buffer_size()
        ):  # closing would wait for the client to read an answer
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _input_is_paused(self) -> bool:
        """No more of a request is read while an earlier one is being answered."""
        if self._in_head:
            return self._is_answering
        return bool(self.pipeline) or self.flow.read_paused

    def _add_to_head(self, num_bytes: int) -> None:
        """Count bytes that the parser has found; a whole head may arrive at once."""
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            self.refuse(head_too_large(self._limits.max_head_bytes))
            raise _Refused

    def _on_request_timeout(self) -> None:
        if self._input_is_paused:
            timeout_s = self._limits.request_timeout_s
            self._arrival = self.loop.call_later(timeout_s, self._on_request_timeout)
            return
        self.refuse(too_slow(self._limits.request_timeout_s))

    def _on_write_timeout(self) -> None:
        _log.info("a client does not read", client=self.client)
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def refuse(self, error: ApiError) -> None:
        _log.info("connection refused", client=self.client, error=error.code)
        may_answer = self._in_head or not self.cycle.response_started
        if may_answer and not self._input_is_paused:
            body = json.dumps(error.body()).encode("ascii")
            headers = {**error.headers, "Content-Type": "application/json", "Connection": "close"}
            lines = [f"{name}: {value}" for name, value in headers.items()]
            reason = HTTPStatus(error.status).phrase
            head = "\r\n".join([f"HTTP/1.1 {error.status} {reason}", *lines])
            self.transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def connections_that_fit(wanted: int) -> int:
    """The number of connections that the limit of open files allows, at most ``wanted``.

    Raises the soft limit as far as needed and allowed.

    Raises:
        SettingsError: the limit allows too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if _is_below(soft, needed):
        soft = min(hard, needed) if _is_below(hard, needed) else needed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not _is_below(soft, needed):
        return wanted
    fit = soft - _OTHER_FILES
    if fit < _FEWEST:
        reason = f"the system allows this process {soft} open files; raise that (ulimit -n)"
        raise SettingsError("--max-connections", wanted, reason)
    _log.warning(
        "fewer connections than asked for: the system limits open files (ulimit -n)",
        files=soft,
        asked=wanted,
        connections=fit,
    )
    return fit


def _is_below(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number
