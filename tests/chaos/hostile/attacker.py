"""Tools of an attack: connections from a hostile address, and requests on them."""

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_HEAD_LIMIT = 1 << 18  # bytes
_READ_BYTES = 1 << 16
_SHOWN_CHARS = 300
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_INTERIM = re.compile(rb"HTTP/1\.1 1\d\d [^\r]*\r\n\r\n")  # before the answer
CLOSED = "closed"  # the connection ended before an answer came
SILENT = "silent"  # the attacker's patience ended before the answer did
UNFINISHED = "unfinished"  # the time of all attacks was over before


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one attempt.

    Attributes:
        status: of HTTP as digits, ``CLOSED``, ``SILENT`` or ``UNFINISHED``.
        text: the beginning of its body.
    """

    status: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile behaviour, repeated at its own rate.

    Attributes:
        attempt: performs it once.
        every_s: pause between two attempts of a lane.
        lanes: attempts that may be in progress at once.
        is_honest: whether it is only unusual: it then has a key and an address that no attack
            uses, and must be answered with 200.
    """

    name: str
    attempt: Callable[["Attacker"], Awaitable[Answer]]
    every_s: float
    lanes: int = 1
    is_honest: bool = False


class Attacker:
    """One of the parallel lanes of an attack.

    Args:
        ports: of the gateways, on loopback.
        key: the API key.
        address: of loopback, to connect from.
    """

    def __init__(self, ports: Sequence[int], key: str, address: str, draw: random.Random) -> None:
        self.draw = draw
        self._ports = ports
        self._key = key
        self._address = address

    @asynccontextmanager
    async def connected(
        self, receive_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to one of the gateways inside the block.

        Args:
            receive_bytes: size of the receive buffer, for an attack that does not read.

        Raises:
            OSError: it was refused.
        """
        connection = socket.socket()
        try:
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.setblocking(False)
            connection.bind((self._address, 0))
            port = self.draw.choice(self._ports)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        except BaseException:
            connection.close()
            raise
        limit = _READ_BYTES if receive_bytes is None else receive_bytes
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(
        self, path: str, num_bytes: int | None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The head of a request; a POST with a JSON body if it has so many bytes."""
        fields = {"Host": "localhost", "Authorization": f"Bearer {self._key}"}
        if num_bytes is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(num_bytes)}
        fields |= {"Connection": "close", **(headers or {})}
        method = "GET" if num_bytes is None else "POST"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
        return "\r\n".join([*lines, "", ""]).encode()

    async def request(
        self,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = 20.0,
    ) -> Answer:
        """Send a request and read its answer; a GET without a body."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        head = self.head(path, None if data is None else len(data), headers)
        return await self.exchange(head + (data or b""), patience_s)

    async def exchange(self, data: bytes, patience_s: float = 20.0) -> Answer:
        """Send these bytes and read until the gateway closes the connection."""
        try:
            async with self.connected() as (reader, writer):
                writer.write(data)
                return await self.answer(reader, patience_s)
        except OSError:
            return Answer(CLOSED)

    async def answer(self, reader: asyncio.StreamReader, patience_s: float) -> Answer:
        """Read an answer to its end; keep the beginning of its body only."""
        seen, text = b"", b""
        try:
            async with asyncio.timeout(patience_s):
                while b"\r\n\r\n" not in seen and len(seen) < _HEAD_LIMIT:
                    more = await reader.read(_READ_BYTES)
                    if not more:
                        return Answer(CLOSED)
                    seen = _INTERIM.sub(b"", seen + more)
                text = seen.partition(b"\r\n\r\n")[2]
                while more := await reader.read(_READ_BYTES):
                    text += more[: max(0, _SHOWN_CHARS - len(text))]
        except TimeoutError:
            return Answer(SILENT, _shown(text))
        except OSError:  # it was reset; what was read before counts
            pass
        found = _STATUS.match(seen)
        return Answer(found[1].decode() if found else CLOSED, _shown(text))

    async def unread(self, path: str, body: bytes, for_s: float) -> Answer:
        """Send a request and leave its answer unread."""
        try:
            async with self.connected(receive_bytes=2048) as (_, writer):
                writer.write(self.head(path, len(body)) + body)
                await asyncio.sleep(for_s)
        except OSError:
            return Answer(CLOSED)
        return Answer(SILENT)


def _shown(text: bytes) -> str:
    return text[:_SHOWN_CHARS].decode(errors="replace")
