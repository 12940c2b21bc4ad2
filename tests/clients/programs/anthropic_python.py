"""anthropic-python."""

import asyncio
from typing import Any, Literal

import anthropic
from pydantic import BaseModel, ConfigDict

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

THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Paris"]
    days: Literal[1, 2, 3]  # the client sends no bounds


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


def messages_tool_runner(server: Any) -> None:
    """beta.messages.tool_runner"""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Paris"]) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "It rains."

    runner = _client(server).beta.messages.tool_runner(
        model=server.model,
        max_tokens=100,
        messages=QUESTION,
        tools=[weather],
        tool_choice={"type": "tool", "name": "weather"},
        max_iterations=2,
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert set(asked) <= {"Oslo", "Paris"}
    assert asked


def messages_parse(server: Any) -> None:
    """messages.parse and stream, a pydantic class"""
    client, asked = _client(server), {"model": server.model, "max_tokens": 200}
    answer = client.messages.parse(**asked, messages=QUESTION, output_format=Forecast)
    assert isinstance(answer.parsed_output, Forecast)
    with client.messages.stream(**asked, messages=QUESTION, output_format=Forecast) as stream:
        final = stream.get_final_message()
    assert isinstance(final.parsed_output, Forecast)


def messages_thinking(server: Any) -> None:
    """messages.create, thinking; the conversation goes on with it"""
    client, asked = _client(server), {"model": server.model, "max_tokens": 16}
    answer = client.messages.create(**asked, messages=QUESTION, thinking=THINKING)
    assert answer.content[0].type == "thinking"
    assert answer.content[0].thinking
    before: Any = [*QUESTION, {"role": "assistant", "content": answer.content}, *QUESTION]
    assert client.messages.create(**asked, messages=before).content


def messages_thinking_streamed(server: Any) -> None:
    """messages.stream, thinking"""
    with _client(server).messages.stream(
        model=server.model, max_tokens=16, messages=QUESTION, thinking=THINKING
    ) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert final.content[0].type == "thinking"
    assert final.content[0].thinking == thought


def messages_async(server: Any) -> None:
    """AsyncAnthropic, messages.stream"""

    async def text() -> str:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        async with client.messages.stream(
            model=server.model, max_tokens=16, messages=QUESTION
        ) as stream:
            return "".join([part async for part in stream.text_stream])

    assert asyncio.run(text())


def messages_raw(server: Any) -> None:
    """messages.with_raw_response, request ids"""
    raw = _client(server).messages.with_raw_response.create(
        model=server.model, max_tokens=4, messages=QUESTION
    )
    message = raw.parse()
    assert message._request_id == raw.headers["x-request-id"] == raw.request_id


def messages_count_tokens(server: Any) -> None:
    """messages.count_tokens"""
    counted = _client(server).messages.count_tokens(model=server.model, messages=QUESTION)
    assert counted.input_tokens > 0


def messages_errors(server: Any) -> None:
    """errors: BadRequestError, NotFoundError"""
    client = _client(server)
    for refused, asked in (
        (anthropic.BadRequestError, {"model": server.model, "max_tokens": 0}),
        (anthropic.NotFoundError, {"model": "another", "max_tokens": 1}),
    ):
        try:
            client.messages.create(**asked, messages=QUESTION)
        except refused as error:
            assert error.body["error"]["message"]
            assert error.request_id
        else:
            raise AssertionError(f"{asked} was accepted")


def models_list(server: Any) -> None:
    """models.list, retrieve"""
    client = _client(server)
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
