"""One HTTP/1.1 connection: upgrades, malformed input, and half-closed connections.

uvicorn loses the body of a request that asks for another protocol, answers malformed requests in
plain text, and treats a half-closed connection as a closed one.
"""

import asyncio
import socket
import struct
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import ApiError, malformed_http, other_protocol

_OF_UPGRADES = (b"upgrade", b"http2-settings")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"  # of Server-Sent Events
_TCP_CLOSED = 7  # TCP_CLOSE in Linux's tcp_states.h
_FIRST_POLL_S = 0.01
_MAX_POLL_INTERVAL_S = 1.0
_PROBE_AFTER_S = 10
_NUM_PROBES = 3


class HttpConnection(HttpToolsProtocol):
    """Serves every request in HTTP/1.1, even if it asks for an upgrade, and half-closed clients.

    A closed connection and a half-closed one look the same until bytes are sent: a closed one is
    reset by them. So a half-closed connection is sent bytes that clients skip, and polled until it
    is reset or the answer is complete.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._upgrades = False  # the parser has stopped after this request's head
        self._ignores_input = False
        self._poll: asyncio.TimerHandle | None = None

    def refuse(self, error: ApiError) -> None:
        """Send an error, if no answer has begun, and close."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        if self._poll is not None:
            self._poll.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._ignores_input:
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)

    def on_message_begin(self) -> None:
        self._upgrades = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._upgrades = self.parser.should_upgrade()
        if not self._upgrades:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._upgrades:
            super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the answer to a complete request, if there is one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._probe()
        self._poll = self.loop.call_later(_FIRST_POLL_S, self._poll_client, _FIRST_POLL_S)
        return True

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                is_tunnel = self.parser.get_method() == b"CONNECT"
                protocol = dict(self.headers).get(b"upgrade", b"").lower()
                if is_tunnel or protocol == b"websocket":
                    self.refuse(other_protocol("a tunnel" if is_tunnel else "a WebSocket"))
                    return
                # The parser ends at an upgrade; a new one continues without it.
                head, rest = self._head_without_upgrade(), data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + rest

    def _head_without_upgrade(self) -> bytes:
        """The head of the current request without its upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name in _OF_UPGRADES:
                continue
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(o for o in options if o.lower() not in _OF_UPGRADES)
            lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse_malformed(self, error: httptools.HttpParserError) -> None:
        if self.transport.is_closing():  # a callback of the parser has refused the request
            return
        cycle = self.cycle
        earlier_is_answered = cycle is not None and not cycle.response_complete
        if earlier_is_answered and not cycle.more_body:
            # The malformed input follows a valid request, whose answer must stay whole.
            cycle.keep_alive = False
            self._ignores_input = True
            return
        is_ours = isinstance(error, httptools.HttpParserCallbackError)
        self.refuse(malformed_http("" if is_ours else str(error)))

    def _probe(self) -> None:
        """Send bytes that reset the connection if the client has closed it, and that it skips else.

        Where none can be sent, TCP's keep-alive finds a closed client after a minute.
        """
        link = self._socket
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_AFTER_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        cycle = self.cycle
        if not cycle.response_started:
            if not self.pipeline and cycle.scope["http_version"] == "1.1":
                self.transport.write(_CONTINUE)
        elif cycle.chunked_encoding:  # only streams are chunked
            self.transport.write(b"%x\r\n%s\r\n" % (len(_COMMENT), _COMMENT))

    def _poll_client(self, waited_s: float) -> None:
        if self.transport.is_closing():
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        (state,) = struct.unpack("B", info)
        if state == _TCP_CLOSED:
            self.transport.abort()
            return
        next_s = min(2 * waited_s, _MAX_POLL_INTERVAL_S)
        self._poll = self.loop.call_later(next_s, self._poll_client, next_s)

    @property
    def _socket(self) -> socket.socket:
        link: socket.socket = self.transport.get_extra_info("socket")
        return link
