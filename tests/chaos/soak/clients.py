"""Misbehaving clients: some leave in the middle, others hardly read."""

import asyncio
import json
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tests.chaos.http_stream import Broken, ask

_LONGEST_READ = 12  # events after which a client leaves at the latest
_SLOW_BUFFER_BYTES = 4096
_SLOW_READ_BYTES = 2048
_SLOW_PAUSE_S = 0.2
_AGAIN_S = 0.2


def _body(draw: random.Random, **more: Any) -> dict[str, Any]:
    return {
        "model": "chaos",
        "prompt": f"Chapter {draw.randrange(10**6)}. It was",
        "max_tokens": draw.randint(8, 96),
        "n": draw.choice((1, 1, 2, 4)),
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


async def leave_early(ports: Sequence[int], draw: random.Random, counts: dict[str, int]) -> None:
    """Begin streams of all kinds and close the connections at random points; until cancelled."""
    while True:
        kind = draw.randrange(4)
        kinds: list[dict[str, Any]] = [
            {"stream_resume": True},
            {},
            {"stream": False},
            {"use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 24},
        ]
        more = kinds[kind]
        headers = {"Idempotency-Key": f"{draw.getrandbits(64):x}"} if draw.random() < 0.3 else {}
        body = _body(draw, **more)
        with suppress(Broken, TimeoutError):
            async with asyncio.timeout(draw.choice((0.05, 0.5, 2.0, 5.0))):
                async with ask(draw.choice(ports), "/v1/completions", body, headers) as response:
                    chunks, left = response.chunks(), draw.randrange(_LONGEST_READ)
                    while left and await anext(chunks, None) is not None:
                        left -= 1
        counts["left"] = counts.get("left", 0) + 1
        await asyncio.sleep(draw.uniform(0, _AGAIN_S))


async def read_slowly(ports: Sequence[int], draw: random.Random, counts: dict[str, int]) -> None:
    """Request long answers and read a little of them now and then; until cancelled."""
    while True:
        body = _body(draw, n=4, logprobs=20, max_tokens=96)
        with suppress(OSError, EOFError):
            await _read_slowly(draw.choice(ports), body)
        counts["read slowly"] = counts.get("read slowly", 0) + 1
        await asyncio.sleep(_AGAIN_S)


async def _read_slowly(port: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    reader, writer = await asyncio.open_connection(sock=connection, limit=_SLOW_READ_BYTES)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        writer.write(head.encode() + data)
        while await reader.read(_SLOW_READ_BYTES):
            await asyncio.sleep(_SLOW_PAUSE_S)
    finally:
        writer.close()
