"""Responses in the background: finished by whichever gateway is there."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.messages.endings import EndFlag
from shared.messages.requests import Abort, Attach
from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.responses.stages import (
    WAITING_S,
    create,
    events_of,
    play,
    reasoning_stage,
    second_gateway,
)


async def until_ended(stage: Stage, response_id: str) -> dict[str, Any]:
    """The response at its end."""
    async with asyncio.timeout(WAITING_S):
        while True:
            found = (await stage.http.get(f"/v1/responses/{response_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return dict(found)
            await asyncio.sleep(0.01)


async def lines_until(lines: AsyncIterator[str], what: str) -> None:
    async for line in lines:
        if what in line:
            return
    pytest.fail(f"the stream ended without {what}")


async def test_it_is_answered_at_once_and_finished_later(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    queued = await stage.openai.responses.create(model="demo", input="Add.", background=True)
    assert queued.status == "queued"
    ended = await until_ended(stage, queued.id)
    assert ended["status"] == "completed"
    assert ended["background"]
    whole = (await create(stage, tools=[], input="Add.")).json()
    texts = [
        [item.get("content") or item.get("arguments") for item in found["output"]]
        for found in (ended, whole)
    ]
    assert texts[0] == texts[1]


async def test_every_stream_of_it_has_the_same_events(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    other = await second_gateway(make_stage, stage)
    events = events_of((await create(stage, background=True, stream=True)).text)
    assert events[-1]["type"] == "response.completed"
    url = f"/v1/responses/{events[-1]['response']['id']}?stream=true"
    for after in range(0, len(events) - 1, 3):
        gateway = (stage, other)[after % 2]
        rest = await gateway.http.get(f"{url}&starting_after={after}")
        assert events_of(rest.text) == events[after + 1 :]
    final = None
    async with other.openai.responses.stream(
        response_id=events[-1]["response"]["id"], starting_after=4
    ) as stream:
        async for event in stream:
            final = event
    assert final is not None
    assert final.type == "response.completed"


async def test_a_stream_follows_while_tokens_come(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("one two three", add_special_tokens=False)
    made = (await create(stage, tools=[], background=True)).json()
    attach = await stage.engine.read_attach()
    assert attach.submit is not None
    submit = await stage.engine.accept_attach(attach, [])
    url = f"/v1/responses/{made['id']}?stream=true"
    async with stage.http.stream("GET", url) as response:
        lines = response.aiter_lines()
        await stage.engine.generate(submit, tokens[:1], flag=None)
        await lines_until(lines, "response.output_text.delta")
        await stage.engine.generate(submit, tokens[1:], EndFlag.STOP)
        await lines_until(lines, "response.completed")
    ended = await until_ended(stage, made["id"])
    assert ended["output"][0]["content"][0]["text"] == "one two three"


async def test_another_gateway_takes_it_over(make_stage: MakeStage) -> None:
    stage = await make_stage()
    other = await second_gateway(make_stage, stage)
    tokens = stage.tokenizer.encode("one two three four", add_special_tokens=False)
    made = (await create(stage, tools=[], background=True)).json()
    submit = await stage.engine.accept_attach(await stage.engine.read_attach(), [])
    await stage.engine.generate(submit, tokens[:2], flag=None)
    url = f"/v1/responses/{made['id']}?stream=true"
    async with other.http.stream("GET", url) as response:
        lines = response.aiter_lines()
        await lines_until(lines, "response.output_text.delta")
        stage.server.stop()
        await stage.running
        attach = await stage.engine.read()
        while not isinstance(attach, Attach):
            assert not isinstance(attach, Abort), "a gateway that leaves must not end it"
            attach = await stage.engine.read()
        again = await stage.engine.accept_attach(attach, tokens[:2], submit=submit)
        await stage.engine.generate(again, tokens[2:], EndFlag.STOP)
        await lines_until(lines, "response.completed")
    ended = await until_ended(other, made["id"])
    assert ended["output"][0]["content"][0]["text"] == "one two three four"


async def test_an_engine_that_has_forgotten_it_goes_on_behind_its_tokens(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    tokens = stage.tokenizer.encode("one two three", add_special_tokens=False)
    made = (await create(stage, tools=[], background=True)).json()
    first = await stage.engine.accept_attach(await stage.engine.read_attach(), [])
    async with stage.http.stream("GET", f"/v1/responses/{made['id']}?stream=true") as response:
        lines = response.aiter_lines()
        await stage.engine.generate(first, tokens[:2], flag=None)
        await lines_until(lines, "response.output_text.delta")
    await stage.engine.end(first, "abort")
    attach = await stage.engine.read_attach()
    assert [view.tokens.tolist() for view in attach.views] == [tokens[:2]]
    again = await stage.engine.accept_attach(attach, submit=first)
    await stage.engine.generate(again, tokens[2:], EndFlag.STOP)
    ended = await until_ended(stage, made["id"])
    assert ended["output"][0]["content"][0]["text"] == "one two three"


async def test_a_cancelled_response_keeps_what_it_has(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("one two three", add_special_tokens=False)
    made = (await create(stage, tools=[], background=True)).json()
    submit = await stage.engine.accept_attach(await stage.engine.read_attach(), [])
    url = f"/v1/responses/{made['id']}"
    async with stage.http.stream("GET", f"{url}?stream=true") as response:
        lines = response.aiter_lines()
        await stage.engine.generate(submit, tokens[:1], flag=None)
        await lines_until(lines, "response.output_text.delta")
    cancelled = await stage.openai.responses.cancel(made["id"])
    assert cancelled.status == "cancelled"
    abort = await stage.engine.read_abort()
    assert abort.request_id == submit.request_id
    assert (await stage.http.post(f"{url}/cancel")).json()["status"] == "cancelled"
    text = cancelled.output[0].content[0].text  # type: ignore[union-attr, index]
    assert text == "one"


async def test_deleting_it_ends_it(stage: Stage) -> None:
    made = (await create(stage, tools=[], background=True)).json()
    submit = await stage.engine.accept_attach(await stage.engine.read_attach(), [])
    await stage.http.delete(f"/v1/responses/{made['id']}")
    abort = await stage.engine.read_abort()
    assert abort.request_id == submit.request_id
    check_error(await stage.http.get(f"/v1/responses/{made['id']}"), 404)


async def test_only_the_background_can_be_cancelled(stage: Stage) -> None:
    play(stage, "ok")
    made = (await create(stage, tools=[])).json()
    check_error(await stage.http.post(f"/v1/responses/{made['id']}/cancel"), 400, "response_id")


async def test_a_repeated_call_is_the_same_response(stage: Stage) -> None:
    play(stage, "ok")
    headers = {"Idempotency-Key": "k"}
    made = [
        (await create(stage, tools=[], background=True, headers=headers)).json() for _ in range(2)
    ]
    assert made[0]["id"] == made[1]["id"]
    assert (await until_ended(stage, made[0]["id"]))["status"] == "completed"


async def test_their_number_is_bounded(make_stage: MakeStage) -> None:
    stage = await make_stage(responses_queued=2)
    made = [(await create(stage, tools=[], background=True)).json() for _ in range(2)]
    assert all(found["status"] == "queued" for found in made)
    refused = await create(stage, tools=[], background=True)
    assert check_error(refused, 429)["code"] == "overloaded"


async def test_an_engine_without_room_is_asked_again(stage: Stage) -> None:
    made = (await create(stage, tools=[], background=True)).json()
    attach = await stage.engine.read_attach()
    assert attach.submit is not None
    await stage.engine.end(attach.submit, "overloaded", "too much is waiting")
    tokens = stage.tokenizer.encode("ok", add_special_tokens=False)
    message = await stage.engine.read()
    while not isinstance(message, Attach):
        message = await stage.engine.read()
    again = await stage.engine.accept_attach(message, [])
    await stage.engine.generate(again, tokens, EndFlag.STOP)
    assert (await until_ended(stage, made["id"]))["status"] == "completed"
