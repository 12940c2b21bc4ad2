"""Bodies that are too large, compressed, or not JSON."""

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest

from tests.gateway.conftest import MakeStage, Stage, check_error


async def test_a_body_over_the_limit_is_a_413(make_stage: MakeStage) -> None:
    stage = await make_stage(max_body_bytes=10_000)
    check_error(await stage.complete(prompt="x" * 20_000), 413)

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"model": "demo", "prompt": "'
        for _ in range(100):
            yield b"x" * 1_000

    response = await stage.http.post("/v1/completions", content=chunks())
    check_error(response, 413)
    stage.answer_text("Hi")
    assert (await stage.complete(prompt="x " * 100, max_tokens=1)).status_code == 200


async def test_an_endless_body_is_not_read_to_its_end(make_stage: MakeStage) -> None:
    stage = await make_stage(max_body_bytes=10_000)
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")  # and no end
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 413")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_compressed_bodies_are_refused(stage: Stage, encoding: str, path: str) -> None:
    data = gzip.compress(b'{"model": "demo", "prompt": "Hi"}')
    response = await stage.http.post(path, content=data, headers={"Content-Encoding": encoding})
    error = check_error(response, 415, "Content-Encoding")
    assert encoding in error["message"]
    assert response.headers["accept-encoding"] == "identity"


async def test_a_body_that_is_compressed_in_secret_is_refused_too(stage: Stage) -> None:
    data = gzip.compress(b'{"model": "demo", "prompt": "Hi"}')
    response = await stage.http.post("/v1/completions", content=data)
    assert "gzip" in check_error(response, 415, "Content-Encoding")["message"]


async def test_bodies_with_identity_encoding_are_read(stage: Stage) -> None:
    stage.answer_text("Hi")
    body = b'{"model": "demo", "prompt": "Hi"}'
    headers = {"Content-Encoding": "identity"}
    response = await stage.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (
            '{"model": "demo", "messages": [{"role": "user", "content": "True"},'
            ' {"role": "assistant", "content": None, "name": None}], "stream": True}',
            "messages[1].content",
            ["messages[1].content=None", "JSON has null"],
        ),
        ('{"model": "demo", "stream": True}', "stream", ["stream=True", "JSON has true"]),
        ('{"stop": ["None \\" None", "x"], "echo": False', None, ["False", "JSON has false"]),
        ("{'model': 'demo'}", None, ["double quotes"]),
        ('{"model": "demo", "n": }', None, ["expected value"]),
        ('{"model": "None', None, ["EOF"]),
        ('{"a": ' + '"\\"' * 100_000 + "None", None, ["valid JSON"]),
    ],
)
async def test_python_literals_are_refused_as_no_json(
    stage: Stage, data: str, param: str | None, words: list[str]
) -> None:
    error = check_error(await stage.http.post("/v1/chat/completions", content=data), 400)
    assert (error["param"], error["code"]) == (param, "invalid_json")
    assert all(word in error["message"] for word in words), error
