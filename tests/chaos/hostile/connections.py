"""Attacks by how a request is sent, and how its answer is read."""

import asyncio
import json
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

from tests.chaos.hostile.attacker import CLOSED, SILENT, Answer, Attacker

_COMPLETIONS = "/v1/completions"
_IDLE_AT_ONCE = 1_025  # four lanes of them are more than a gateway's connections
_BODILESS_AT_ONCE = 515  # two lanes of them are more than a gateway's calls
_CONNECT_AT_ONCE = 50
_MALFORMED = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  /v1/models  HTTP/1.1\r\nHost : x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff0\r\n{}",
    b"GET /v1/models HTTP/1.1\r\nX-A: \x00\x01\x02\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n folded: header\r\n\r\n",
    b"GET /" + b"%00%ff/../" * 200 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 10_000 + b"\r\n",
    b"\r\n" * 50_000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n",
)


async def idle_connections(attacker: Attacker) -> Answer:
    """Connections on which nothing is ever sent."""
    return await _many_silent(attacker, b"", _IDLE_AT_ONCE)


async def posts_without_bodies(attacker: Attacker) -> Answer:
    """Heads that promise a body which never comes."""
    return await _many_silent(attacker, attacker.head(_COMPLETIONS, 1_000), _BODILESS_AT_ONCE)


async def trickled_bodies(attacker: Attacker) -> Answer:
    """A body that arrives byte by byte, as slowly as keeps the connection open."""
    body = json.dumps(_body(attacker.draw)).encode()
    try:
        async with attacker.connected() as (reader, writer):
            writer.write(attacker.head(_COMPLETIONS, len(body)))
            reading = asyncio.ensure_future(attacker.answer(reader, 60.0))
            try:
                for index in range(len(body)):
                    if reading.done():
                        break
                    writer.write(body[index : index + 1])
                    await asyncio.sleep(0.4)
                return await reading
            finally:
                reading.cancel()
    except OSError:
        return Answer(CLOSED)


async def trickled_head(attacker: Attacker) -> Answer:
    """Headers that never end."""
    try:
        async with attacker.connected() as (_, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
            for number in range(100):
                writer.write(f"X-{number}: y\r\n".encode())
                await writer.drain()
                await asyncio.sleep(0.3)
    except OSError:
        return Answer(CLOSED)
    return Answer(SILENT)


async def upgrade_to_http2(attacker: Attacker) -> Answer:
    """Java's HttpClient: it offers HTTP/2, and sends its body in a second segment."""
    body = json.dumps(_body(attacker.draw, max_tokens=2, n=1)).encode()
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
    upgrade |= {"HTTP2-Settings": "AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA"}
    try:
        async with attacker.connected() as (reader, writer):
            writer.write(attacker.head(_COMPLETIONS, len(body), upgrade))
            await asyncio.sleep(0.05)
            writer.write(body)
            return await _first_line(reader)
    except OSError:
        return Answer(CLOSED)


async def malformed(attacker: Attacker) -> Answer:
    """Bytes that are not quite HTTP."""
    return await attacker.exchange(attacker.draw.choice(_MALFORMED), 3.0)


async def random_bytes(attacker: Attacker) -> Answer:
    """A good request with a few bytes of it changed."""
    body = json.dumps(_body(attacker.draw)).encode()
    data = bytearray(attacker.head(_COMPLETIONS, len(body)) + body)
    for _ in range(attacker.draw.randint(1, 6)):
        data[attacker.draw.randrange(len(data))] = attacker.draw.randrange(256)
    return await attacker.exchange(bytes(data), 3.0)


async def half_closed(attacker: Attacker) -> Answer:
    """A client that closes its half of the connection once it has sent its request."""
    body = json.dumps(_body(attacker.draw, max_tokens=4, n=1, stream=False)).encode()
    try:
        async with attacker.connected() as (reader, writer):
            writer.write(attacker.head(_COMPLETIONS, len(body)) + body)
            await writer.drain()
            writer.write_eof()
            return await attacker.answer(reader, 60.0)
    except OSError:
        return Answer(CLOSED)


async def pipelined(attacker: Attacker) -> Answer:
    """A thousand requests on one connection before the first answer is read."""
    head = attacker.head("/v1/models", None, {"Connection": "keep-alive"})
    return await attacker.exchange(head * 1_000, 5.0)


async def early_leaver(attacker: Attacker) -> Answer:
    """Streams that are left at any moment, of all kinds."""
    draw = attacker.draw
    more: dict[str, Any] = draw.choice(
        (
            {"stream_resume": True},
            {},
            {"stream": False},
            {"use_beam_search": True, "n": 3, "temperature": 0, "max_tokens": 24},
        )
    )
    patience_s = draw.choice((0.05, 0.5, 2.0, 5.0))
    return await attacker.request(_COMPLETIONS, _body(draw, **more), patience_s=patience_s)


async def slow_reader(attacker: Attacker) -> Answer:
    """Long answers of which a little is read now and then."""
    body = json.dumps(_body(attacker.draw, n=4, logprobs=20, max_tokens=96)).encode()
    with suppress(OSError):
        async with attacker.connected(receive_bytes=4096) as (reader, writer):
            writer.write(attacker.head(_COMPLETIONS, len(body)) + body)
            while await reader.read(2048):
                await asyncio.sleep(0.2)
            return Answer("200")
    return Answer(CLOSED)


async def wrong_keys(attacker: Attacker) -> Answer:
    """API keys that do not exist."""
    key = {"Authorization": f"Bearer {attacker.draw.getrandbits(256):x}"}
    return await attacker.request(_COMPLETIONS, _body(attacker.draw), key)


async def costly_pages(attacker: Attacker) -> Answer:
    """Pages that take the gateway longest to write."""
    path = attacker.draw.choice(("/openapi.json", "/metrics", "/docs", "/v1/models", "/prefixes"))
    return await attacker.request(path, patience_s=5.0)


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


async def _many_silent(attacker: Attacker, first: bytes, number: int) -> Answer:
    """Open connections, send the same on each, and leave them as they are for a while."""

    async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            reader, writer = await stack.enter_async_context(attacker.connected())
        except OSError:
            return None
        writer.write(first)
        return reader, writer

    async with AsyncExitStack() as stack:
        found = []
        for start in range(0, number, _CONNECT_AT_ONCE):
            count = min(_CONNECT_AT_ONCE, number - start)
            found += await asyncio.gather(*(opened() for _ in range(count)))
            await asyncio.sleep(0.1)
        await asyncio.sleep(attacker.draw.uniform(5.0, 15.0))
        held = [pair for pair in found if pair is not None and not pair[0].at_eof()]
        return Answer(SILENT if held else CLOSED, f"{len(held)} of {number} were left open")


async def _first_line(reader: asyncio.StreamReader) -> Answer:
    """The status of an answer on a connection that stays open."""
    try:
        async with asyncio.timeout(60.0):
            line = await reader.readline()
    except TimeoutError:
        return Answer(SILENT)
    return Answer(line.split()[1].decode(), "") if line.startswith(b"HTTP/1.") else Answer(CLOSED)
