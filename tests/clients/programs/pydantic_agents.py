"""pydantic-ai."""

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Oslo?"


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def _agent(server: Any, output: Any = str, kind: Any = OpenAIChatModel, **settings: Any) -> Any:
    provider = OpenAIProvider(base_url=server.base_url, api_key="none")
    model = kind(server.model, provider=provider)
    return Agent(
        model,
        output_type=output,
        instructions="Be brief.",
        retries=0,
        model_settings=ModelSettings(**{"max_tokens": 400, "seed": 1, **settings}),
    )


async def run_text(server: Any) -> None:
    """Agent.run"""
    assert (await _agent(server, max_tokens=16).run(QUESTION)).output


async def run_stream(server: Any) -> None:
    """Agent.run_stream"""
    async with _agent(server, max_tokens=16).run_stream(QUESTION) as result:
        assert [text async for text in result.stream_text(delta=True)]


async def tool_output(server: Any) -> None:
    """Agent.run, ToolOutput of a pydantic class"""
    result = await _agent(server, ToolOutput(Forecast)).run(QUESTION)
    assert isinstance(result.output, Forecast)


async def tool_output_streamed(server: Any) -> None:
    """Agent.run_stream, ToolOutput of a pydantic class"""
    async with _agent(server, ToolOutput(Forecast)).run_stream(QUESTION) as result:
        assert isinstance(await result.get_output(), Forecast)


async def native_output(server: Any) -> None:
    """Agent.run, NativeOutput of a pydantic class"""
    result = await _agent(server, NativeOutput(Forecast)).run(QUESTION)
    assert isinstance(result.output, Forecast)


async def function_tool(server: Any) -> None:
    """Agent.run, a function as a tool and its result"""
    agent, cities = _agent(server, ToolOutput(Forecast), temperature=1.0), []

    @agent.tool_plain
    def weather(city: Literal["Oslo", "Paris"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"It rains in {city}."

    for seed in range(20):  # the model chooses between that tool and the one of the output
        result = await agent.run(QUESTION, model_settings=ModelSettings(seed=seed))
        assert isinstance(result.output, Forecast)
        if cities:
            return
    raise AssertionError("the tool was never called")


async def reasoning(server: Any) -> None:
    """Agent.run, ThinkingPart of reasoning_content"""
    regex = r"<think>[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}"
    result = await _agent(server, extra_body={"guided_regex": regex}).run(QUESTION)
    parts = [part for message in result.all_messages() for part in message.parts]
    assert any(isinstance(part, ThinkingPart) for part in parts)


async def native_output_and_tool(server: Any) -> None:
    """Agent.run, NativeOutput beside a function as a tool"""
    agent = _agent(server, NativeOutput(Forecast), temperature=1.0)

    @agent.tool_plain
    def weather(city: Literal["Oslo", "Paris"]) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    assert isinstance((await agent.run(QUESTION)).output, Forecast)


async def responses_text(server: Any) -> None:
    """responses.create by OpenAIResponsesModel"""
    assert (await _agent(server, kind=OpenAIResponsesModel, max_tokens=16).run(QUESTION)).output


async def responses_stream(server: Any) -> None:
    """responses.create, streamed, by OpenAIResponsesModel"""
    agent = _agent(server, kind=OpenAIResponsesModel, max_tokens=16)
    async with agent.run_stream(QUESTION) as result:
        assert [text async for text in result.stream_text(delta=True)]


async def responses_outputs(server: Any) -> None:
    """responses.create by OpenAIResponsesModel, ToolOutput and NativeOutput"""
    for output in (ToolOutput(Forecast), NativeOutput(Forecast)):
        result = await _agent(server, output, OpenAIResponsesModel).run(QUESTION)
        assert isinstance(result.output, Forecast)
