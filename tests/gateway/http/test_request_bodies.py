"""Bodies that are small in bytes and large in work."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from gateway.http.call import Call
from gateway.http.request_bodies import BodyReader, count_values
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.openai.requests.test_bad_input import check_error

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\,[]{}:é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('b"\\,'), inner),
    max_leaves=30,
)


def values_in(value: Any) -> tuple[int, int]:
    """All values; strings, keys, lists and maps."""
    if isinstance(value, str):
        return 1, 1
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return 1, 0
    found = [values_in(item) for item in inner]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + sum(n for n, _ in found), 1 + keys + sum(n for _, n in found)


@settings(deadline=None)
@given(JSON)
def test_values_are_counted_before_they_are_parsed(value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()
    num_values, num_structures = count_values(data)
    expected_values, expected_structures = values_in(value)
    assert num_structures == expected_structures
    assert num_values >= expected_values


def completion(extra: str) -> bytes:
    return b'{"model": "demo", "prompt": "a", ' + extra.encode() + b"}"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (completion(f'"x": [{",".join(["[]"] * 2_000)}]'), "strings, lists and maps"),
        (completion(",".join(f'"f{n}": 0' for n in range(2_000))), "strings, lists and maps"),
        (completion(f'"metadata": {{{",".join(f"{n!r}: 0" for n in range(9))}}}'), "valid JSON"),
        (completion(f'"x": [{"0," * 20_000}0]'), "values"),
    ],
)
async def test_a_body_of_too_many_values_is_refused_unparsed(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, data: bytes, expected: str
) -> None:
    stage = await make_stage(max_body_bytes=60_000)
    monkeypatch.setattr("gateway.http.request_bodies._INLINE_BYTES", 0)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        error = check_error(await stage.http.post(path, content=data), 400)
        assert expected in error["message"], path


async def test_a_long_text_may_hold_any_characters(stage: Stage) -> None:
    prompt = '[{"\\,' * 20_000
    found = await stage.http.post("/tokenize", json={"prompt": prompt})
    assert found.status_code == 200, found.text
    assert found.json()["count"] > 20_000


def request(data: bytes, tenant: str = "") -> Request:
    """A call as the application sees it."""

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    scope = {"type": "http", "headers": [], "client": ("10.1.2.3", 5), "pagestream.call": Call()}
    scope["pagestream.call"].tenant = tenant  # type: ignore[attr-defined]
    return Request(scope, receive)


def thread_of_parsing(data: bytes) -> threading.Thread:
    return threading.current_thread()


async def test_long_bodies_are_parsed_off_the_loop_and_short_ones_on_it() -> None:
    bodies = BodyReader(10**6)
    loop = threading.current_thread()
    assert await bodies.read(request(b"x" * 1_000), thread_of_parsing) is loop
    assert await bodies.read(request(b"x" * 100_000), thread_of_parsing) is not loop
    bodies.close()


async def test_long_bodies_of_one_caller_are_parsed_in_turn_with_those_of_others() -> None:
    bodies, order, may_go_on = BodyReader(10**6), list[str](), threading.Event()

    def read(tenant: str) -> "asyncio.Future[None]":
        def parse(data: bytes) -> None:
            order.append(tenant)
            assert may_go_on.wait(10)

        return asyncio.ensure_future(bodies.read(request(b"x" * 100_000, tenant), parse))

    waiting = [read("a") for _ in range(10)]
    async with asyncio.timeout(10):
        while not order:
            await asyncio.sleep(0.001)
    waiting.append(read("b"))
    while bodies._thread._queues.keys() != {"a", "b"}:
        await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*waiting)
    assert order.index("b") <= 2
    bodies.close()
