"""A server with scripted answers, byte by byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


def head(kind: str = "text/event-stream", status: str = "200 OK", more: str = "") -> bytes:
    lines = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Connection: close\r\n\r\n"
    return lines.encode("ascii")


def event(body: object) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def token(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Answers every request with the same pieces.

    A number among the pieces is a pause in seconds.

    Attributes:
        requests: bodies as they arrived.
        most_at_once: most connections that were open at the same time.
    """

    def __init__(self, pieces: Sequence[bytes | float]) -> None:
        self.requests: list[dict[str, object]] = []
        self.most_at_once = 0
        self.url = ""
        self._pieces = pieces
        self._open = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeServer"]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        request = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        lengths = [line for line in request.split("\r\n") if line.startswith("Content-Length")]
        if lengths:
            size = int(lengths[0].partition(":")[2])
            self.requests.append(json.loads(await reader.readexactly(size)))
        for piece in self._pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
        self._open -= 1
        writer.close()
        await writer.wait_closed()
