"""Bodies of responses that are refused, each by the name of its own field."""

from typing import Any

import pytest

from tests.gateway.conftest import MakeStage, Stage, check_error
from tests.gateway.responses.stages import TOOL, create, play, reasoning_stage

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [IMAGE]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input"),
    ({"input": "x", "messages": []}, "messages"),
    ({"instructions": 1}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {}}, "stream_options"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {"x": "y" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"previous_response_id": 1}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"priority": 2**40}, "priority"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_the_field_at_fault_is_named(
    make_stage: MakeStage, body: dict[str, Any], param: str
) -> None:
    stage = await make_stage(tokenizer=(await reasoning_stage(make_stage)).tokenizer)
    check_error(await create(stage, **{"tools": [], **body}), 400, param)
    assert stage.engine.received == []


async def test_tools_need_a_template_that_describes_them(stage: Stage) -> None:
    error = check_error(await create(stage), 400, "tools")
    assert "chat template" in error["message"]


async def test_a_response_that_goes_on_cannot_be_continued(stage: Stage) -> None:
    made = (await create(stage, tools=[], background=True)).json()
    refused = await create(stage, tools=[], previous_response_id=made["id"])
    error = check_error(refused, 400, "previous_response_id")
    assert made["id"] in error["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("starting_after=1", "starting_after"),
        ("stream=1", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
    ],
)
async def test_a_stream_begins_after_the_number_of_an_event(
    stage: Stage, query: str, param: str
) -> None:
    play(stage, "ok")
    made = (await create(stage, tools=[])).json()
    check_error(await stage.http.get(f"/v1/responses/{made['id']}?{query}"), 400, param)
