"""Connections of clients that ask for other protocols, close their side early, or send no HTTP."""

import asyncio
import json

import pytest

from shared.messages.requests import Abort
from tests.gateway.conftest import Stage
from tests.gateway.http.test_connection_limits import answer, connect

_BODY = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 2}).encode()
_STREAM = json.dumps({"model": "demo", "prompt": "Hello", "stream": True}).encode()
_UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings, close\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
)


def post(body: bytes, extra: bytes = b"", version: bytes = b"1.1") -> tuple[bytes, bytes]:
    """Head and body of POST /v1/completions."""
    line = b"POST /v1/completions HTTP/%s\r\n" % version
    head = line + b"Host: x\r\nContent-Type: application/json\r\n"
    return head + extra + b"Content-Length: %d\r\n\r\n" % len(body), body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of one answer on a connection that stays open."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(length)


@pytest.mark.parametrize("together", [True, False])
async def test_a_request_to_upgrade_to_http2_is_answered_in_http1(
    stage: Stage, together: bool
) -> None:
    stage.answer_text("Hi")
    reader, writer = await connect(stage)
    head, body = post(_BODY, _UPGRADE.replace(b", close", b""))
    next_head, next_body = post(_BODY, b"Connection: close\r\n")
    if together:
        writer.write(head + body + next_head + next_body)
    else:
        writer.write(head)
        await writer.drain()
        await stage.until(
            lambda: any(c.cycle is not None and c.cycle.more_body for c in stage.server.connections)
        )  # the head was read alone
        writer.write(body)
    status, data = await read_answer(reader)
    assert (status, json.loads(data)["choices"][0]["text"]) == (200, "Hi")
    if not together:
        writer.write(next_head + next_body)
    status, text = await answer(reader)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "Hi")
    writer.close()


async def test_options_of_the_connection_other_than_the_upgrade_are_kept(stage: Stage) -> None:
    reader, writer = await connect(stage)
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n" + _UPGRADE + b"\r\n")
    status, _ = await answer(reader)  # reads until the connection is closed
    assert status == 200
    writer.close()


async def test_a_websocket_is_refused_with_a_message(stage: Stage) -> None:
    reader, writer = await connect(stage)
    writer.write(
        b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    status, body = await answer(reader)
    assert (status, json.loads(body)["error"]["code"]) == (400, "unsupported_protocol")
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
@pytest.mark.parametrize("first", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_what_is_no_http_gets_an_error_in_json(
    stage: Stage, first: bytes, data: bytes
) -> None:
    reader, writer = await connect(stage)
    if first:
        writer.write(first)
        assert (await read_answer(reader))[0] == 200
    writer.write(data)
    status, body = await answer(reader)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["code"] in ("invalid_http", "unsupported_protocol")
    writer.close()


async def test_garbage_behind_a_request_leaves_its_answer_whole(stage: Stage) -> None:
    reader, writer = await connect(stage)
    writer.write(b"".join(post(_STREAM)))
    submit = await stage.engine.accept_next()
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.write(b"garbage\r\n\r\n" * 3)
    await writer.drain()
    await stage.engine.generate(submit, stage.tokenizer.encode("Hi there"))
    rest = await asyncio.wait_for(reader.read(), 10)
    assert b"[DONE]" in rest
    assert b"invalid_http" not in rest
    writer.close()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("body", [_BODY, _STREAM])
async def test_a_client_that_sends_nothing_more_gets_its_whole_answer(
    stage: Stage, body: bytes, version: bytes
) -> None:
    reader, writer = await connect(stage)
    writer.write(b"".join(post(body, version=version)))
    writer.write_eof()
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, stage.tokenizer.encode("Hi there"))
    text = (await asyncio.wait_for(reader.read(), 10)).decode()
    assert "finish_reason" in text
    assert body == _BODY or "[DONE]" in text
    assert not any(isinstance(message, Abort) for message in stage.engine.received)
    writer.close()


async def test_a_stream_goes_on_after_its_client_has_closed_its_side(stage: Stage) -> None:
    reader, writer = await connect(stage)
    writer.write(b"".join(post(_STREAM)))
    submit = await stage.engine.accept_next()
    tokens = stage.tokenizer.encode("Hi there, how are you?")
    await stage.engine.generate(submit, tokens[:2], None)
    await asyncio.wait_for(reader.readuntil(b"finish_reason"), 10)
    writer.write_eof()
    await asyncio.wait_for(reader.readuntil(b"\r\n:\n\n\r\n"), 10)  # asks whether it is there
    await stage.engine.generate(submit, tokens[2:])
    assert b"[DONE]" in await asyncio.wait_for(reader.read(), 10)
    writer.close()


@pytest.mark.parametrize("body", [_BODY, _STREAM])
async def test_a_client_that_closes_altogether_ends_its_generation(
    stage: Stage, body: bytes
) -> None:
    _, writer = await connect(stage)
    writer.write(b"".join(post(body)))
    submit = await stage.engine.accept_next()
    writer.close()
    assert (await stage.engine.read_abort()).request_id == submit.request_id
    await stage.until(lambda: len(stage.server.connections) <= 1)


async def test_half_a_request_is_not_waited_for(stage: Stage) -> None:
    reader, writer = await connect(stage)
    head, body = post(_BODY)
    writer.write(head + body[:5])
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
