"""The part of HTTP/1.1 that a client of streams needs, with little CPU time.

A body that ends before its last chunk is an error here, because this is the sign of a dead process.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_LONGEST_LINE = 1 << 20


class Broken(Exception):
    """The connection failed, or ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Response:
    """The head of an answer, and the source of its body."""

    status: int
    headers: Mapping[str, str]  # by lower-case name
    _reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The parts of the body as they were sent.

        Raises:
            Broken: the connection ended early.
        """
        reader = self._reader
        try:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                yield await reader.readexactly(int(self.headers.get("content-length", "0")))
                return
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield (await reader.readexactly(size + 2))[:-2]
        except (OSError, EOFError, ValueError) as error:
            raise Broken(f"cut off: {type(error).__name__}") from None

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])


@asynccontextmanager
async def ask(
    port: int, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send a request to this machine; a POST if it has a body.

    Raises:
        Broken: no connection, or no answer.
    """
    data = b"" if body is None else json.dumps(body).encode()
    fields = {"Host": "localhost", "Connection": "close", **(headers or {})}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in fields.items()]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    except OSError as error:
        raise Broken(f"no connection: {type(error).__name__}") from None
    try:
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (OSError, EOFError) as error:
            raise Broken(f"no answer: {type(error).__name__}") from None
        pairs = (line.partition(":") for line in lines[1:] if line)
        found = {name.lower(): value.strip() for name, _, value in pairs}
        yield Response(int(lines[0].split()[1]), found, reader)
    finally:
        writer.close()
