"""Gateways whose model reasons and calls tools, and engines that play one answer."""

import json
from typing import Any

import httpx

from shared.messages.endings import EndFlag
from tests.gateway.answers.tool_models import ADD, call_text, demo_tokenizer
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.resume.played_streams import Played

TEXT = "<think>Sum é 😀.</think>\nSo:\n" + call_text('{"a": "é 😀", "b": 2}') + call_text("{}")
TOOL: dict[str, Any] = {"type": "function"} | ADD["function"]  # type: ignore[operator]
WAITING_S = 30.0


async def reasoning_stage(make_stage: MakeStage, text: str = TEXT, **changes: Any) -> Stage:
    """A gateway whose engine answers everything with a text."""
    stage = await make_stage(tokenizer=demo_tokenizer(), **changes)
    play(stage, text)
    return stage


async def second_gateway(make_stage: MakeStage, stage: Stage, **changes: Any) -> Stage:
    """Another gateway of the same engine, which the first one's stage plays."""
    other = await make_stage(bus=stage.engine.bus, tokenizer=stage.tokenizer, **changes)
    await stage.engine.start_epoch()
    await stage.engine.publish()
    return other


def play(stage: Stage, text: str, flag: EndFlag = EndFlag.STOP, scored: bool = False) -> Played:
    """Let the engine answer every request with a text."""
    tokens = stage.tokenizer.encode(text, add_special_tokens=False)
    played = Played(stage.engine, tokens, flag=flag, scored=scored)
    stage.spawn(played.serve())
    return played


async def create(stage: Stage, **body: Any) -> httpx.Response:
    """POST /v1/responses."""
    headers = body.pop("headers", {})
    asked = {"model": "demo", "input": "Hello", "tools": [TOOL], **body}
    return await stage.http.post("/v1/responses", json=asked, headers=headers)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        event = json.loads(lines["data"])
        assert lines["event"] == event["type"]
        found.append(event)
    numbers = [event["sequence_number"] for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return found
