"""anthropic-python."""

from typing import Any

import anthropic

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def _client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def messages_create(server: Any) -> None:
    """messages.create"""
    answer = _client(server).messages.create(
        model=server.model, max_tokens=16, system="Be brief.", messages=QUESTION
    )
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 16


def messages_streamed(server: Any) -> None:
    """messages.create, streamed"""
    events = _client(server).messages.create(
        model=server.model, max_tokens=16, messages=QUESTION, stream=True
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def messages_stream(server: Any) -> None:
    """messages.stream"""
    with _client(server).messages.stream(
        model=server.model, max_tokens=16, messages=QUESTION
    ) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_text() == text


def messages_tools(server: Any) -> None:
    """messages.create, tools and the result of one"""
    client, messages = _client(server), list(QUESTION)
    answer = client.messages.create(
        model=server.model,
        max_tokens=200,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    )
    assert answer.stop_reason == "tool_use"
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert call.input["city"] in ("Oslo", "Paris")
    messages.append({"role": "assistant", "content": answer.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    messages.append({"role": "user", "content": [result]})
    assert client.messages.create(
        model=server.model, max_tokens=16, messages=messages, tools=[WEATHER]
    ).content


def messages_tools_streamed(server: Any) -> None:
    """messages.stream, tools"""
    with _client(server).messages.stream(
        model=server.model,
        max_tokens=200,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "any"},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert any(block.type == "tool_use" for block in final.content)


def messages_count_tokens(server: Any) -> None:
    """messages.count_tokens"""
    counted = _client(server).messages.count_tokens(model=server.model, messages=QUESTION)
    assert counted.input_tokens > 0


def messages_errors(server: Any) -> None:
    """messages.create, BadRequestError"""
    try:
        _client(server).messages.create(model=server.model, max_tokens=0, messages=[])
    except anthropic.BadRequestError as error:
        assert error.body
    else:
        raise AssertionError("a request without messages was accepted")
