"""One HTTP/1.1 connection, read as clients write it.

uvicorn loses the body of a request that asks for another protocol, answers what is no HTTP in plain
text, and takes the end of what a client sends for the end of the client.
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
_FIRST_LOOK_S = 0.01
_MOST_BETWEEN_LOOKS_S = 1.0
_PROBE_AFTER_S = 10
_NUM_PROBES = 3


class HttpConnection(HttpToolsProtocol):
    """Serves a request in HTTP/1.1 whatever it would rather speak, and answers half-closed clients.

    A client that closes its connection and one that only ends its side of it look the same. An
    answer's first bytes tell: a closed connection is reset by them. So a half-closed connection
    is sent something that clients skip, and looked at until it is reset or the answer is complete.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._upgrades = False  # the parser has stopped behind this request's head
        self._ignores_input = False
        self._look: asyncio.TimerHandle | None = None

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, if no answer has begun, and close."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
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
        """Keep the connection for the answer to what has arrived in full, if there is any."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._probe()
        self._look = self.loop.call_later(_FIRST_LOOK_S, self._look_at_client, _FIRST_LOOK_S)
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
                # The parser is done with a connection that changes its protocol; this one does not.
                head, rest = self._head_without_upgrade(), data[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + rest

    def _head_without_upgrade(self) -> bytes:
        """The head of the current request, as it would be if the client knew HTTP/1.1 alone."""
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
        if self.transport.is_closing():  # refused by a callback of the parser
            return
        cycle = self.cycle
        earlier_is_answered = cycle is not None and not cycle.response_complete
        if earlier_is_answered and not cycle.more_body:
            # What is wrong came behind a request that is in order: its answer stays whole.
            cycle.keep_alive = False
            self._ignores_input = True
            return
        is_ours = isinstance(error, httptools.HttpParserCallbackError)
        self.refuse(malformed_http("" if is_ours else str(error)))

    def _probe(self) -> None:
        """Send what resets the connection if the client has closed it, and else changes nothing.

        Where nothing can be sent, TCP's own probes find a closed client after a minute.
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
        elif cycle.chunked_encoding:  # of streams alone
            self.transport.write(b"%x\r\n%s\r\n" % (len(_COMMENT), _COMMENT))

    def _look_at_client(self, waited_s: float) -> None:
        if self.transport.is_closing():
            return
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        (state,) = struct.unpack("B", info)
        if state == _TCP_CLOSED:
            self.transport.abort()
            return
        next_s = min(2 * waited_s, _MOST_BETWEEN_LOOKS_S)
        self._look = self.loop.call_later(next_s, self._look_at_client, next_s)

    @property
    def _socket(self) -> socket.socket:
        link: socket.socket = self.transport.get_extra_info("socket")
        return link
