"""Messages by Anthropic's own client: whole and streamed, with tools and thinking."""

import json
from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError, beta_async_tool

from gateway.text.tokenizer import Tokenizer
from shared.messages.endings import EndFlag
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.responses.stages import TEXT, play, reasoning_stage
from tests.gateway.tokenizers_for_tests import byte_level

ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
HELLO = [{"role": "user", "content": "Hello"}]


async def create(stage: Stage, **body: Any) -> Any:
    asked = {"model": "demo", "max_tokens": 5, "messages": HELLO, **body}
    return await stage.http.post("/v1/messages", json=asked)


async def tools_client(make_stage: MakeStage, text: str = TEXT) -> AsyncAnthropic:
    stage = await reasoning_stage(make_stage, text)
    return AsyncAnthropic(base_url=stage.url, api_key="none", max_retries=0)


async def test_a_message_has_thinking_text_and_calls(make_stage: MakeStage) -> None:
    async with await tools_client(make_stage) as client:
        message = await client.messages.create(
            model="demo",
            max_tokens=80,
            system="Be brief.",
            messages=HELLO,  # type: ignore[arg-type]
            tools=[ADD],  # type: ignore[list-item]
        )
    thinking, text, first, second = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Sum é 😀."
    assert text.type == "text"
    assert text.text == "So:"
    assert first.type == second.type == "tool_use"
    assert first.input == {"a": "é 😀", "b": 2}
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 10


async def test_a_stream_makes_the_same_message(make_stage: MakeStage) -> None:
    async with await tools_client(make_stage) as client:
        asked: Any = {"model": "demo", "max_tokens": 80, "messages": HELLO, "tools": [ADD]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


@pytest.mark.parametrize(
    ("text", "flag", "reason", "sequence"),
    [
        ("one two", EndFlag.STOP, "end_turn", None),
        ("one two", EndFlag.LENGTH, "max_tokens", None),
        ("one STOP two", EndFlag.STOP, "stop_sequence", "STOP"),
    ],
)
async def test_the_end_is_named(
    make_stage: MakeStage, text: str, flag: EndFlag, reason: str, sequence: str | None
) -> None:
    stage = await make_stage()
    play(stage, text, flag)
    for stream in (False, True):
        found = await create(stage, stop_sequences=["STOP"], stream=stream)
        if stream:
            lines = [line for line in found.text.split("\n") if line.startswith("data: ")]
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            shown = next(event["delta"] for event in events if event["type"] == "message_delta")
        else:
            shown = found.json()
            assert shown["content"] == [{"type": "text", "text": text.partition("STOP")[0]}]
        assert (shown["stop_reason"], shown["stop_sequence"]) == (reason, sequence)


async def test_arguments_that_are_no_json_are_shown_as_they_are(make_stage: MakeStage) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": \n</tool_call>'
    stage = await reasoning_stage(make_stage, text)
    found = (await create(stage, tools=[ADD])).json()
    [block] = [block for block in found["content"] if block["type"] == "tool_use"]
    assert block["input"].keys() == {"invalid_json"}


async def test_a_conversation_goes_through_the_chat_template(make_stage: MakeStage) -> None:
    stage = await make_stage(tokenizer=(await reasoning_stage(make_stage)).tokenizer)
    played = play(stage, "ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add 1 and 2."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "R", "signature": ""},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": True},
                {"type": "text", "text": "Thanks.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    found = await create(stage, messages=messages, system=system, tools=[ADD])
    assert found.status_code == 200, found.text
    [submit] = played.known.values()
    prompt = stage.tokenizer.decode(submit.prompt.tolist(), skip_special=False)
    parts = (
        *("Be brief.", "Be kind.", "Add 1 and 2.", "<think>R</think>", "I add.", '"a": 1'),
        *("Error: 3", "Thanks."),
    )
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "[{{ enable_thinking | default('unset') }} {{ reasoning_effort | default('unset') }}]"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, "[unset unset]assistant: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "[True unset]assistant: "),
        ({"thinking": {"type": "disabled"}}, "[False unset]assistant: "),
        ({"thinking": {"type": "adaptive"}}, "[unset unset]assistant: "),
        ({"output_config": {"effort": "low"}}, "[unset low]assistant: "),
        ({"output_config": {"effort": "max"}}, "[unset xhigh]assistant: "),
        ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "assistant: {"),
    ],
)
async def test_the_template_is_told_how_to_answer(
    make_stage: MakeStage, body: dict[str, Any], end: str
) -> None:
    source = byte_level()
    source.chat_template = _TEMPLATE
    stage = await make_stage(tokenizer=Tokenizer(source))
    played = play(stage, "ok")
    found = await create(stage, **body)
    assert found.status_code == 200, found.text
    [submit] = played.known.values()
    assert stage.tokenizer.decode(submit.prompt.tolist(), skip_special=False).endswith(end)
    asked = {"model": "demo", "messages": HELLO, **body}
    counted = (await stage.http.post("/v1/messages/count_tokens", json=asked)).json()
    assert counted == {"input_tokens": found.json()["usage"]["input_tokens"]}


async def test_tokens_are_counted_as_they_are_used(make_stage: MakeStage) -> None:
    async with await tools_client(make_stage) as client:
        asked: Any = {"model": "demo", "messages": HELLO, "tools": [ADD]}
        counted = await client.messages.count_tokens(**asked)
        message = await client.messages.create(max_tokens=80, **asked)
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [({"type": "any"}, True), ({"type": "tool", "name": "add"}, True), ({"type": "auto"}, False)],
)
async def test_a_call_can_be_required(
    make_stage: MakeStage, choice: dict[str, Any], constrained: bool
) -> None:
    stage = await make_stage(tokenizer=(await reasoning_stage(make_stage)).tokenizer)
    played = play(stage, "ok")
    found = await create(stage, tools=[ADD], tool_choice=choice)
    assert found.status_code == 200, found.text
    [submit] = played.known.values()
    assert bool(submit.sampling.grammar) == constrained


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0].type"),
    ({"system": 1}, "system"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tools": [ADD | {"other": 1}]}, "tools[0].other"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
    ),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"n": 2}, "n"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED)
async def test_the_field_at_fault_is_named(
    make_stage: MakeStage, body: dict[str, Any], field: str
) -> None:
    stage = await make_stage(tokenizer=(await reasoning_stage(make_stage)).tokenizer)
    found = await create(stage, **body)
    assert found.status_code == 400, found.text
    shown = found.json()
    assert shown["type"] == "error"
    assert shown["error"]["type"] == "invalid_request_error"
    assert field in shown["error"]["message"]
    assert stage.engine.received == []


async def test_errors_are_those_of_the_client(make_stage: MakeStage) -> None:
    async with await tools_client(make_stage) as client:
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.messages.create(model="other", max_tokens=5, messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match="max_tokens"):
            await client.messages.create(model="demo", max_tokens=10**4, messages=HELLO)  # type: ignore[arg-type]


async def test_the_clients_tool_runner_goes_on_without_threads(make_stage: MakeStage) -> None:
    @beta_async_tool
    async def add(a: float, b: float) -> str:
        """Adds two numbers."""
        return str(a + b)

    async with await tools_client(make_stage) as client:
        runner = client.beta.messages.tool_runner(
            model="demo",
            max_tokens=50,
            messages=HELLO,  # type: ignore[arg-type]
            tools=[add],
            max_iterations=1,
        )
        [message] = [message async for message in runner]
    assert message.stop_reason == "tool_use"


async def test_the_client_finds_the_id_of_a_call(make_stage: MakeStage) -> None:
    stage = await make_stage()
    play(stage, "ok")
    answers = [await create(stage), await create(stage, max_tokens=0)]
    for answer in answers:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    other = await stage.complete(max_tokens=0)
    assert "request-id" not in other.headers


async def test_a_failed_generation_ends_its_stream_with_an_error(make_stage: MakeStage) -> None:
    stage = await make_stage()
    call = stage.spawn(create(stage, stream=True))
    submit = await stage.engine.accept_next()
    await stage.engine.end(submit, "error", "the worker gave up")
    last = (await call).text.strip().split("\n\n")[-1]
    kind, data = last.split("\n")
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["error"]["type"] == "api_error"
    assert "the worker gave up" in error["error"]["message"]


async def test_a_key_may_stand_in_their_header(make_stage: MakeStage) -> None:
    stage = await make_stage(api_key="a-secret-of-tests")
    play(stage, "ok")
    right = {"x-api-key": "a-secret-of-tests"}
    for header, status in ((right, 200), ({"x-api-key": "no"}, 401), ({}, 401)):
        body = {"model": "demo", "max_tokens": 5, "messages": HELLO}
        found = await stage.http.post("/v1/messages", json=body, headers=header)
        assert found.status_code == status
        if status == 401:
            assert found.json()["error"]["type"] == "authentication_error"
