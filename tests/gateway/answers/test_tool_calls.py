"""Chats whose answers call tools, as clients see them."""

import json
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.answers.tool_models import ADD, call_text, demo_tokenizer
from tests.gateway.conftest import MakeStage, Stage, check_error, events

ARGUMENTS = '{"a": 1, "b": [2, "x é"]}'
ANSWER = "<think>Sum them.</think>\n\nLet me add.\n" + call_text(ARGUMENTS) + "\n" + call_text("{}")
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


async def test_an_answer_in_one_piece_has_calls_reasoning_and_content(stage: Stage) -> None:
    stage.answer_text(ANSWER, flag=EndFlag.STOP)
    response = await stage.chat(tools=[ADD], n=2)
    for choice in response.json()["choices"]:
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me add."
        assert message["reasoning_content"] == message["reasoning"] == "Sum them."
        found = [call["function"] for call in message["tool_calls"]]
        assert found == [
            {"name": "add", "arguments": ARGUMENTS},
            {"name": "add", "arguments": "{}"},
        ]
    ids = [
        call["id"] for each in response.json()["choices"] for call in each["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 4


async def test_openais_client_puts_streamed_calls_together(stage: Stage) -> None:
    stage.answer_text(ANSWER, flag=EndFlag.STOP)
    messages: Any = [{"role": "user", "content": "1 + 2"}]
    tools: Any = [ADD]
    async with stage.openai.chat.completions.stream(
        model="demo", messages=messages, tools=tools
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [ARGUMENTS, "{}"]
    assert [call.function.name for call in calls] == ["add", "add"]
    assert "tool_calls.function.arguments.delta" in kinds
    whole: Any = await stage.openai.chat.completions.create(
        model="demo", messages=messages, tools=tools
    )
    assert whole.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


async def test_the_conversation_goes_on_with_the_tools_result(stage: Stage) -> None:
    stage.answer(lambda _: [2], flag=EndFlag.STOP)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    response = await stage.chat(messages=messages, tools=[ADD])
    assert response.status_code == 200, response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    prompt = stage.tokenizer.decode(submit.prompt.tolist())
    assert "<think>Hm.</think><tool_call>" in prompt
    assert '"name": "add"' in prompt
    assert "Adds two numbers." in prompt


async def test_clients_may_send_back_what_they_have_made_of_an_answer(stage: Stage) -> None:
    stage.answer(lambda _: [2], flag=EndFlag.STOP)
    function = {"name": "add", "arguments": ARGUMENTS, "parsed_arguments": json.loads(ARGUMENTS)}
    call = {"id": "c1", "type": "function", "function": function, "index": 0}
    shown = {"parsed": {"a": [1]}, "provider_specific_fields": {"refusal": None}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "So:", "tool_calls": [call], **shown},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    response = await stage.chat(messages=messages, tools=[ADD])
    assert response.status_code == 200, response.text
    [submit] = [each for each in stage.engine.received if isinstance(each, Submit)]
    assert "parsed" not in stage.tokenizer.decode(submit.prompt.tolist())


@pytest.mark.parametrize("text", ["{a: 1,, ", '{"a": "x', "[1] 2"])
async def test_arguments_that_are_no_json_are_shown_as_they_are(stage: Stage, text: str) -> None:
    stage.answer_text(f'<tool_call>{{"name": "add", "arguments": {text}', flag=EndFlag.STOP)
    choice = (await stage.chat(tools=[ADD])).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == text.removesuffix(" 2")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None or text.endswith("2")


async def test_a_call_that_is_cut_off_ended_by_length(stage: Stage) -> None:
    stage.answer_text('<tool_call>{"name": "add", "arguments": {"a"')
    choice = (await stage.chat(tools=[ADD], stream=False)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'


async def test_without_tools_or_with_none_calls_are_text(stage: Stage) -> None:
    stage.answer_text("<think>Hm</think>" + call_text("{}"), flag=EndFlag.STOP)
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        choice = (await stage.chat(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == call_text("{}")
        assert choice["message"]["reasoning_content"] == "Hm"
        assert choice["finish_reason"] == "stop"


async def test_without_parallel_calls_the_answer_ends_with_the_first(stage: Stage) -> None:
    body = {"tools": [ADD], "parallel_tool_calls": False, "stream": True}
    answer = stage.spawn(stage.chat(**body))
    submit = await stage.engine.accept_next()
    text = "So: " + call_text(ARGUMENTS) + call_text("{}")
    tokens = stage.tokenizer.encode(text, add_special_tokens=False)
    await stage.engine.generate(submit, tokens, flag=None)
    stop = await stage.engine.read_stop()
    assert ARGUMENTS in stage.tokenizer.decode(tokens[: stop.num_tokens])
    chunks = [json.loads(each) for each in events((await answer).text)[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_markers_that_are_special_tokens_reach_the_parser(make_stage: MakeStage) -> None:
    special = ("<tool_call>", "</tool_call>", "<|end|>")
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    tokenizer = demo_tokenizer(template, special)
    stage = await make_stage(tokenizer=tokenizer, tool_call_parser="hermes")
    stage.answer_text("Yes é" + call_text(ARGUMENTS) + "<|end|>", flag=EndFlag.STOP)
    choice = (await stage.chat(tools=[ADD])).json()["choices"][0]
    assert choice["message"]["content"] == "Yes é"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    choice = (await stage.chat()).json()["choices"][0]
    assert "<tool_call>" not in choice["message"]["content"]  # special tokens have no text


async def test_log_probabilities_and_token_ids_stand_beside_calls(stage: Stage) -> None:
    text = call_text(ARGUMENTS)
    stage.answer_text(text, flag=EndFlag.STOP)
    response = await stage.chat(tools=[ADD], stream=True, return_token_ids=True)
    chunks = [json.loads(each)["choices"][0] for each in events(response.text)[:-1]]
    found = [token for each in chunks for token in each.get("token_ids", [])]
    assert stage.tokenizer.decode(found) == text


async def test_tools_of_a_model_whose_template_has_none_are_refused_with_what_to_do(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage(tokenizer=demo_tokenizer(template=None))
    error = check_error(await stage.chat(tools=[ADD]), 400, "tools")
    assert "chat template does not describe tools" in error["message"]
    unknown = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
    stage = await make_stage(tokenizer=demo_tokenizer(template=unknown))
    error = check_error(await stage.chat(tools=[ADD]), 400, "tools")
    assert "--tool-call-parser" in error["message"]
    stage = await make_stage(tokenizer=demo_tokenizer(template=unknown), tool_call_parser="llama3")
    stage.answer_text('{"name": "add", "parameters": {"a": 1}}', flag=EndFlag.STOP)
    choice = (await stage.chat(tools=[ADD])).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


async def test_bad_tools_are_refused_by_name(stage: Stage) -> None:
    error = check_error(await stage.chat(tools=[ADD, NOW, ADD]), 400, "tools")
    assert error["param"] == "tools[2].function.name"
    assert "'add'" in error["message"]
    named = {"type": "function", "function": {"name": "missing"}}
    for tools in ([ADD], []):
        error = check_error(await stage.chat(tools=tools, tool_choice=named), 400, "tool_choice")
        assert "'missing'" in error["message"]
    check_error(await stage.chat(tool_choice="required"), 400, "tool_choice")
    check_error(await stage.chat(tools=[ADD], tool_choice="any"), 400, "tool_choice")
    check_error(await stage.chat(tools=[ADD], tool_choice={"type": "tool"}), 400, "tool_choice")
    check_error(await stage.chat(tools=[ADD], parallel_tool_calls=1), 400, "parallel_tool_calls")
    odd = {"type": "function", "function": {"name": "add two"}}
    error = check_error(await stage.chat(tools=[odd]), 400, "tools")
    assert error["param"] == "tools[0].function.name"
