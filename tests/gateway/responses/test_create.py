"""Responses whole and streamed, by the official client."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from shared.messages.endings import EndFlag
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.responses.stages import TEXT, TOOL, create, events_of, play, reasoning_stage


def kinds(output: list[Any]) -> list[str]:
    return [item["type"] if isinstance(item, dict) else item.type for item in output]


async def test_a_response_holds_reasoning_text_and_calls(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    answer = await stage.openai.responses.create(model="demo", input="Add.", tools=[TOOL])  # type: ignore[list-item]
    assert kinds(answer.output) == ["reasoning", "message", "function_call", "function_call"]
    assert answer.status == "completed"
    assert answer.output_text == "So:"
    reasoning, _, first, second = answer.output
    assert reasoning.content[0].text == "Sum é 😀."  # type: ignore[union-attr, index]
    assert json.loads(first.arguments) == {"a": "é 😀", "b": 2}  # type: ignore[union-attr]
    assert first.name == "add"  # type: ignore[union-attr]
    assert first.call_id != second.call_id  # type: ignore[union-attr]
    usage = answer.usage
    assert usage is not None
    tokens = stage.tokenizer.encode(TEXT, add_special_tokens=False)
    assert usage.output_tokens == len(tokens)
    assert 0 < usage.output_tokens_details.reasoning_tokens < len(tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_stream_makes_the_same_response(make_stage: MakeStage) -> None:
    stage = await reasoning_stage(make_stage)
    async with stage.openai.responses.stream(model="demo", input="Add.", tools=[TOOL]) as stream:  # type: ignore[list-item]
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    whole = await stage.openai.responses.retrieve(final.id)
    ours = json.loads(whole.model_dump_json())
    assert kinds(ours["output"]) == ["reasoning", "message", "function_call", "function_call"]
    events = [event.type for event in seen]
    assert events[:2] == ["response.created", "response.in_progress"]
    assert events[-1] == "response.completed"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == whole.output_text
    arguments = [
        event.arguments for event in seen if event.type == "response.function_call_arguments.done"
    ]
    assert arguments == [item["arguments"] for item in ours["output"][2:]]
    done = [event.item.id for event in seen if event.type == "response.output_item.done"]
    assert done == [item["id"] for item in ours["output"]]
    raw = await create(stage, stream=True)
    last = events_of(raw.text)[-1]["response"]
    stored = (await stage.http.get(f"/v1/responses/{last['id']}")).json()
    assert stored == last


class Person(BaseModel):
    name: str
    age: int


async def test_an_answer_is_parsed_into_the_callers_class(stage: Stage) -> None:
    play(stage, '{"name": "Ada", "age": 36}')
    answer = await stage.openai.responses.parse(model="demo", input="Who?", text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    submit = stage.engine.received[0]
    assert submit.sampling.grammar  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_cut_off_is_incomplete(stage: Stage, stream: bool) -> None:
    play(stage, "too long", EndFlag.LENGTH)
    found = await create(stage, tools=[], max_output_tokens=2, stream=stream)
    shown = events_of(found.text)[-1]["response"] if stream else found.json()
    assert shown["status"] == "incomplete"
    assert shown["incomplete_details"] == {"reason": "max_output_tokens"}
    assert shown["output"][0]["status"] == "incomplete"
    assert shown["output"][0]["content"][0]["text"] == "too long"


async def test_log_probabilities_stand_beside_the_text(stage: Stage) -> None:
    play(stage, "one two", scored=True)
    found = await create(stage, tools=[], include=["message.output_text.logprobs"], top_logprobs=0)
    part = found.json()["output"][0]["content"][0]
    tokens = stage.tokenizer.encode("one two", add_special_tokens=False)
    assert [item["logprob"] for item in part["logprobs"]] == [-0.25 * token for token in tokens]
    assert "".join(item["token"] for item in part["logprobs"]) == part["text"]


async def test_a_conversation_goes_through_the_chat_template(make_stage: MakeStage) -> None:
    stage = await make_stage(tokenizer=(await reasoning_stage(make_stage)).tokenizer)
    played = play(stage, "ok")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add 1 and 2."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": "I add."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "user", "content": "Thanks."},
    ]
    found = await create(stage, input=items, instructions="Be brief.")
    assert found.status_code == 200, found.text
    [submit] = played.known.values()
    prompt = stage.tokenizer.decode(submit.prompt.tolist(), skip_special=False)
    places = [
        prompt.index(part)
        for part in ("Be brief.", "Add 1 and 2.", "<think>R</think>", "I add.", '"a": 1', "3")
    ]
    assert places == sorted(places)
    assert prompt.count("<|assistant|>") == 2  # the earlier answer, and the next


async def test_a_failed_generation_is_a_failed_response(stage: Stage) -> None:
    call = stage.spawn(create(stage, tools=[], stream=True))
    submit = await stage.engine.accept_next()
    await stage.engine.end(submit, "error", "the worker gave up")
    events = events_of((await call).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["message"] == events[-1]["response"]["error"]["message"]
    assert "the worker gave up" in events[-2]["message"]
