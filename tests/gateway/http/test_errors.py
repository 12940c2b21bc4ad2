"""What clients make of errors."""

import asyncio

from openai import ConflictError

from gateway.http.errors import failed
from shared.messages.requests import Attach
from tests.gateway.conftest import Stage


async def test_the_official_client_does_not_take_back_what_another_call_delivers(
    stage: Stage,
) -> None:
    engine = stage.engine
    client = stage.openai.with_options(max_retries=2)

    async def ask() -> str:
        headers = {"Idempotency-Key": "a"}
        try:
            answer = await client.completions.create(
                model="demo", prompt="Hello", extra_headers=headers
            )
        except ConflictError:
            return "taken over"
        return answer.choices[0].text

    first = stage.spawn(ask())
    await engine.accept_attach(await engine.read_attach(), [], ended={})
    second = stage.spawn(ask())
    attach = await engine.read_attach()
    assert await asyncio.wait_for(first, 20) == "taken over"
    submit = await engine.accept_attach(attach, [], ended={})
    await engine.generate(submit, stage.tokenizer.encode("ab", add_special_tokens=False))
    assert await second == "ab"
    assert sum(isinstance(message, Attach) for message in engine.received) == 2


def test_a_stream_that_was_taken_over_is_not_retried() -> None:
    assert failed("why", "stream_lost").headers == {"x-should-retry": "false"}
    assert failed("why").headers == {}
