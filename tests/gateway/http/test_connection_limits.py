"""Connections that send too much, too slowly, or do not read."""

import asyncio
import json
import resource
import socket

import httpx
import pytest

from gateway.http.connection_limits import connections_that_fit
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.test_lifecycle import tokens_of


async def connect(stage: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = stage.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and body of an answer after which the connection is closed."""
    text = (await asyncio.wait_for(reader.read(), 10)).decode()
    head, _, body = text.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


@pytest.mark.parametrize("piece", [b"X-Long: " + b"x" * 200, b"X-A: b\r\n" * 25])
async def test_a_head_that_does_not_end_is_refused(make_stage: MakeStage, piece: bytes) -> None:
    stage = await make_stage(max_head_bytes=2048)
    reader, writer = await connect(stage)
    writer.write(b"GET /version HTTP/1.1\r\n")
    sent = 0
    while sent < 3_000:
        writer.write(piece)
        await writer.drain()
        sent += len(piece)
    status, body = await answer(reader)
    assert status == 431
    assert json.loads(body)["error"]["code"] == "head_too_large"
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 3_000,
        b"GET /version HTTP/1.1\r\nHost: x" + b"\r\nX-A: b" * 300,
        b"GET /" + b"x" * 3_000 + b" HTTP/1.1\r\nHost: x",
    ],
)
async def test_a_head_that_arrives_whole_is_refused_too(make_stage: MakeStage, head: bytes) -> None:
    stage = await make_stage(max_head_bytes=2048)
    reader, writer = await connect(stage)
    writer.write(head + b"\r\n\r\n")
    status, body = await answer(reader)
    assert status == 431
    assert json.loads(body)["error"]["code"] == "head_too_large"
    writer.close()


async def test_a_large_head_sent_ahead_is_not_served(make_stage: MakeStage) -> None:
    stage = await make_stage(max_head_bytes=2048)
    reader, writer = await connect(stage)
    first = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(first + b"GET /v1/models HTTP/1.1\r\nX-Long: " + b"x" * 3_000 + b"\r\n\r\n")
    text = (await asyncio.wait_for(reader.read(), 10)).decode()
    assert '"demo"' not in text
    writer.close()


async def test_a_head_within_the_limit_is_served_again_and_again(make_stage: MakeStage) -> None:
    stage = await make_stage(max_head_bytes=4096)
    for _ in range(5):  # on one connection
        response = await stage.http.get("/version", headers={"X-Long": "x" * 3_000})
        assert response.status_code == 200
    stage.answer_text("Hi")
    assert (await stage.complete(user="u" * 100_000)).status_code == 200


async def test_trailers_that_do_not_end_close_the_connection(make_stage: MakeStage) -> None:
    stage = await make_stage(max_head_bytes=2048)
    reader, writer = await connect(stage)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"1\r\n{\r\n0\r\n")
    for _ in range(30):
        writer.write(b"X-Trailer: " + b"y" * 100 + b"\r\n")
    await writer.drain()
    status, _ = await answer(reader)
    assert status == 431
    writer.close()


async def test_a_body_in_tiny_chunks_is_no_attack(stage: Stage) -> None:
    stage.answer_text("Hi")
    body = json.dumps({"model": "demo", "prompt": "Hi", "user": "u" * 3_000}).encode()

    async def bytewise() -> object:
        for byte in body:
            yield bytes([byte])

    response = await stage.http.post("/v1/completions", content=bytewise())  # type: ignore[arg-type]
    assert response.status_code == 200


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /version HTTP/1.1\r\nHost",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
    ],
)
async def test_a_request_that_does_not_arrive_is_given_up(
    make_stage: MakeStage, beginning: bytes
) -> None:
    stage = await make_stage(request_timeout=0.2)
    reader, writer = await connect(stage)
    writer.write(beginning)
    status, body = await answer(reader)
    assert status == 408
    assert json.loads(body)["error"]["code"] == "request_timeout"
    writer.close()


async def test_a_long_answer_is_not_a_slow_request(make_stage: MakeStage) -> None:
    stage = await make_stage(request_timeout=0.1)
    waiting = stage.spawn(stage.complete())
    submit = await stage.engine.accept_next()
    [connection] = [found for found in stage.server.connections if found._is_answering]
    assert connection._arrival is None, "no clock runs for a request that has arrived"
    await stage.engine.generate(submit, tokens_of(stage, "ab"))
    assert (await waiting).json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    "second",
    [
        b"GET /version HTTP/1.1\r\nHost",
        b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
    ],
)
async def test_a_request_sent_ahead_does_not_harm_the_answer_before_it(
    make_stage: MakeStage, second: bytes
) -> None:
    stage = await make_stage(request_timeout=0.1)
    reader, writer = await connect(stage)
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode() + second)
    submit = await stage.engine.accept_next()
    [connection] = [found for found in stage.server.connections if found._is_answering]
    clock = connection._arrival
    await stage.until(lambda: connection._arrival is not clock)  # it ran out, and begins again
    await stage.engine.generate(submit, tokens_of(stage, "ab"))
    text = (await asyncio.wait_for(reader.read(), 10)).decode()
    first, _, rest = text.partition("0\r\n\r\n")
    assert first.startswith("HTTP/1.1 200")
    assert "[DONE]" in first
    assert rest.startswith("HTTP/1.1 408")
    writer.close()


async def test_what_is_no_request_does_not_keep_a_connection(make_stage: MakeStage) -> None:
    stage = await make_stage(request_timeout=0.1)
    reader, writer = await connect(stage)
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"}")
    writer.write(b"\r\n")
    [connection] = stage.server.connections
    await stage.until(lambda: connection._arrival is not None)
    writer.close()


async def test_a_client_that_never_reads_is_cut_off_and_its_request_aborted(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(write_timeout=0.2)
    host, port = stage.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "demo", "prompt": "Hi", "stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        submit = await stage.engine.read_submit()
        # More than the kernel takes on its own, known to the log at once.
        token = max(range(300, 4096), key=lambda token: len(stage.tokenizer.decode([token])))
        await stage.engine.accept(submit, [token] * 800_000)
        await stage.until(lambda: stage.model.engine.num_open == 0, 30.0)
    assert (await stage.engine.read_abort()).request_id == submit.request_id


UNFINISHED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"


async def test_connections_beyond_the_limit_get_an_error(make_stage: MakeStage) -> None:
    stage = await make_stage(max_connections=16)
    held = [await connect(stage) for _ in range(16)]
    for _, other in held:
        other.write(UNFINISHED)
    await stage.until(lambda: stage.server.service.quotas.calls.held == 16)
    reader, writer = await connect(stage)
    status, body = await answer(reader)
    assert status == 503
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    writer.close()
    for _, other in held:
        other.close()
    await stage.until(lambda: not stage.server.connections)
    assert (await stage.http.get("/version")).status_code == 200


@pytest.mark.parametrize("beginning", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\nX-Slow"])
async def test_idle_connections_beyond_the_limit_make_room_for_others(
    make_stage: MakeStage, beginning: bytes
) -> None:
    stage = await make_stage(max_connections=16)
    used = [await connect(stage) for _ in range(4)]
    for _, writer in used:
        writer.write(UNFINISHED)
    await stage.until(lambda: stage.server.service.quotas.calls.held == 4)
    idle = [await connect(stage) for _ in range(40)]
    for _, writer in idle:
        writer.write(beginning)
    for _ in range(3):  # newcomers, each with a connection of its own
        async with httpx.AsyncClient(base_url=stage.url) as http:
            assert (await http.get("/version")).status_code == 200
    assert not any(reader.at_eof() for reader, _ in used)
    await asyncio.wait_for(idle[0][0].read(), 5)  # the oldest were closed
    for _, writer in used + idle:
        writer.close()


async def test_a_connection_is_idle_again_when_its_answer_is_complete(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(max_connections=16)
    kept = await connect(stage)
    for _ in range(2):
        kept[1].write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await kept[0].readuntil(b"}")
    others = [await connect(stage) for _ in range(16)]
    assert await asyncio.wait_for(kept[0].read(), 5) == b""
    assert (await stage.http.get("/version")).status_code == 200
    for _, writer in [kept, *others]:
        writer.close()


async def test_one_address_has_only_so_many_connections(make_stage: MakeStage) -> None:
    stage = await make_stage(max_connections=16, trusted_proxies="none")  # a quarter: 4
    held = [await connect(stage) for _ in range(4)]
    for _, writer in held:
        writer.write(UNFINISHED)
    await stage.until(lambda: stage.server.service.quotas.calls.held == 4)
    reader, writer = await connect(stage)
    status, body = await answer(reader)
    assert status == 429
    assert "4 connections from this address" in json.loads(body)["error"]["message"]
    host, port = stage.url.removeprefix("http://").split(":")
    elsewhere = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    elsewhere[1].write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await elsewhere[0].readline()).startswith(b"HTTP/1.1 200")
    for _, other in [*held, (reader, writer), elsewhere]:
        other.close()


async def test_beside_two_thousand_idle_connections_others_are_served(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2_000 if hard >= 6_000 else (hard - 500) // 2  # both ends are in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 6_000)), hard))
    idle = [await connect(stage) for _ in range(wanted)]
    stage.answer_text("Hi")
    for _ in range(30):
        assert (await stage.complete()).status_code == 200
    assert not any(reader.at_eof() for reader, _ in idle)
    for _, writer in idle:
        writer.close()


def test_the_limit_of_open_files_is_raised_as_far_as_needed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert connections_that_fit(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
