"""What calls in progress may hold, all together and of one API key."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.access.call_limits import CallLimits, CallQuotas, LimitCalls
from gateway.http.call import AccessLog, read_body
from gateway.http.errors import ApiError
from gateway.http.long_responses import PiecewiseJson, items, members
from shared.metrics import GatewayMetrics
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.openai.requests.test_bad_input import check_error
from tests.gateway.test_lifecycle import tokens_of

KEYS = {name: f"ps-the-key-of-{name}" for name in ("alice", "bob")}


@pytest.fixture
def api_keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    path.write_text("".join(f"{name} sha256:{digest}\n" for name, digest in digests.items()))
    return str(path)


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def complete(stage: Stage, name: str, **body: Any) -> httpx.Response:
    given = {"model": "demo", "prompt": "Hello", **body}
    return await stage.http.post("/v1/completions", json=given, headers=by(name))


async def begun_post(
    stage: Stage, name: str | None, sent: bytes = b"", length: int = 1_000, path: str = "/tokenize"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A POST whose body does not arrive, or not all of it."""
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = f"Authorization: {by(name)['Authorization']}\r\n" if name else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}Content-Length: {length}\r\n\r\n"
    writer.write(head.encode() + sent)
    return reader, writer


def held(stage: Stage, quota: str) -> int:
    """What all callers hold of a quota."""
    found: int = getattr(stage.server.service.quotas, quota).held
    return found


async def test_one_key_leaves_calls_for_the_others(make_stage: MakeStage, api_keys: str) -> None:
    stage = await make_stage(api_keys=api_keys, max_concurrent_calls=4)
    held_open = [await begun_post(stage, "alice") for _ in range(2)]
    await stage.until(lambda: held(stage, "calls") == 2)
    refused = await complete(stage, "alice")
    error = check_error(refused, 429)
    assert error["message"] == "2 calls with this API key are in progress already"
    assert int(refused.headers["retry-after"]) > 0
    stage.answer_text("Hi")
    assert (await complete(stage, "bob")).status_code == 200
    for _, writer in held_open:
        writer.close()
    await stage.until(lambda: held(stage, "calls") == 0)
    assert (await complete(stage, "alice")).status_code == 200


async def test_a_key_without_others_may_use_all(make_stage: MakeStage) -> None:
    stage = await make_stage(api_key=KEYS["alice"], max_concurrent_calls=2)
    waiting = [stage.spawn(complete(stage, "alice")) for _ in range(2)]
    submits = [await stage.engine.accept_next() for _ in waiting]
    error = check_error(await complete(stage, "alice"), 429)
    assert error["message"] == "2 calls are in progress already"
    for submit in submits:
        await stage.engine.generate(submit, tokens_of(stage, "ab"))
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_the_bodies_of_one_key_leave_memory_for_the_others(
    make_stage: MakeStage, api_keys: str, path: str
) -> None:
    limits = {"max_total_body_bytes": 16_000, "max_total_tokenize_bytes": 16_000}
    limits |= {"max_body_bytes": 6_000, "max_tokenize_bytes": 6_000}
    stage = await make_stage(api_keys=api_keys, **limits)
    quota = "token_bytes" if path == "/tokenize" else "body_bytes"
    _, writer = await begun_post(stage, "alice", b" " * 5_000, 6_000, path)
    await stage.until(lambda: held(stage, quota) == 5_000)
    body = {"model": "demo", "prompt": "a" * 4_000}
    refused = await stage.http.post(path, json=body, headers=by("alice"))
    error = check_error(refused, 429)
    assert "with this API key in progress may have 8000 bytes together" in error["message"]

    async def unmeasured() -> AsyncIterator[bytes]:
        yield json.dumps(body).encode()

    refused = await stage.http.post(path, content=unmeasured(), headers=by("alice"))
    check_error(refused, 429)
    stage.answer_text("Hi")
    for name in ("alice", "bob"):
        small = {**body, "prompt": "a"}
        assert (await stage.http.post(path, json=small, headers=by(name))).status_code == 200
    large = await stage.http.post(path, json=body, headers=by("bob"))
    assert large.status_code != 429
    writer.close()
    await stage.until(lambda: held(stage, quota) == 0)


async def test_an_overdue_body_gives_way_to_a_call_that_needs_its_place(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await make_stage(max_concurrent_calls=2)
    first = await begun_post(stage, None)
    await stage.until(lambda: held(stage, "calls") == 1)
    second = await begun_post(stage, None)
    await stage.until(lambda: held(stage, "calls") == 2)
    assert (await stage.http.post("/tokenize", json={"prompt": "a"})).status_code == 429
    monkeypatch.setattr("gateway.access.call_limits._GRACE_S", 0.0)
    assert (await stage.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
    head = await asyncio.wait_for(first[0].readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head.lower()
    assert held(stage, "calls") == 1  # the second is still waited for
    for _, writer in (first, second):
        writer.close()


async def test_a_key_makes_room_among_its_own_calls(
    make_stage: MakeStage, api_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.access.call_limits._GRACE_S", 0.0)
    stage = await make_stage(api_keys=api_keys, max_concurrent_calls=4)
    bobs = await begun_post(stage, "bob")
    await stage.until(lambda: held(stage, "calls") == 1)
    alices = [await begun_post(stage, "alice") for _ in range(2)]
    await stage.until(lambda: held(stage, "calls") == 3)
    tokenized = await stage.http.post("/tokenize", json={"prompt": "a"}, headers=by("alice"))
    assert tokenized.status_code == 200
    assert (await alices[0][0].readline()).startswith(b"HTTP/1.1 408")
    assert held(stage, "calls") == 2
    for _, writer in (bobs, *alices):
        writer.close()


LIMITS = CallLimits(
    max_calls=4,
    max_body_bytes=10**6,
    max_total_body_bytes=10**7,
    max_total_token_bytes=10**7,
    max_key_share=0.5,
    body_timeout_s=0.05,
)


async def test_a_trickle_does_not_renew_the_deadline_of_a_body() -> None:
    num_bytes, sent = 0, list[Message]()

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_body(Request(scope, receive), 10**6)
        except ApiError as error:
            response = Response(str(error), error.status, error.headers)
        await response(scope, receive, send)

    async def trickle() -> Message:
        nonlocal num_bytes
        num_bytes += 1
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    quotas, metrics = CallQuotas(LIMITS), GatewayMetrics("demo", "e")
    app = AccessLog(LimitCalls(read_all, quotas, lambda: False, lambda: False, metrics))
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "client": None}
    await asyncio.wait_for(app(scope, trickle, send), 10)
    assert sent[0]["status"] == 408
    assert num_bytes > 1


async def test_what_is_thrown_away_of_a_body_that_is_too_large_does_not_count(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(max_total_tokenize_bytes=3_000, max_tokenize_bytes=2_000)
    _, writer = await begun_post(stage, None, b" " * 9_000, 10_000)
    await stage.until(lambda: held(stage, "calls") == 1)
    body = json.dumps({"prompt": "a" * 1_500})
    assert (await stage.http.post("/tokenize", content=body)).status_code == 200
    assert held(stage, "token_bytes") == 0
    writer.close()


# ------------------------------------------------------------------ long answers


async def test_a_long_answer_is_the_same_json_as_a_short_one(stage: Stage) -> None:
    prompt = "Good “day” 😀\n" * 3_000
    body = {"prompt": prompt, "return_token_strs": True}
    found = await stage.http.post("/tokenize", json=body)
    assert found.status_code == 200
    assert "content-length" not in found.headers
    tokens = stage.tokenizer.encode(prompt)
    spelled = [stage.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    assert found.json() == {
        "count": len(tokens),
        "max_model_len": 256,
        "tokens": tokens,
        "token_strs": spelled,
    }
    back = await stage.http.post("/detokenize", json={"tokens": tokens * 3})
    assert back.json() == {"prompt": ("<|bos|>" + prompt) * 3}


async def test_the_rest_of_an_answer_is_not_made_before_the_client_reads() -> None:
    made = 0
    may_send = asyncio.Event()

    def pieces() -> Any:
        nonlocal made
        for piece in members(("tokens", items(range(100_000)))):
            made += 1
            yield piece

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            received.append(message["body"])
            await may_send.wait()

    async def receive() -> Message:
        raise AssertionError

    received: list[bytes] = []
    sending = asyncio.ensure_future(PiecewiseJson(pieces())({"type": "http"}, receive, send))
    for _ in range(10):
        await asyncio.sleep(0)
    assert made == 1
    may_send.set()
    await sending
    assert json.loads(b"".join(received)) == {"tokens": list(range(100_000))}
    assert max(map(len, received)) < 100_000


async def test_bodies_for_tokens_have_a_limit_of_their_own(make_stage: MakeStage) -> None:
    stage = await make_stage(max_tokenize_bytes=2_000)
    for path, body in (
        ("/tokenize", {"prompt": "a" * 2_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 2_000}]}),
        ("/detokenize", {"tokens": [5] * 1_000}),
    ):
        check_error(await stage.http.post(path, json=body), 413)
    stage.answer_text("Hi")
    assert (await stage.complete(prompt="a" * 2_000, user="u" * 2_000)).status_code != 413
