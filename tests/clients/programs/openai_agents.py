"""openai-agents, with chat completions."""

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Oslo?"
set_tracing_disabled(True)


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


@function_tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def _agent(server: Any, kind: Any = OpenAIChatCompletionsModel, **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    settings = {"max_tokens": 200, **options.pop("settings", {})}
    return Agent(
        name="Weather",
        instructions="Be brief.",
        model=kind(model=server.model, openai_client=client),
        model_settings=ModelSettings(**settings),
        **options,
    )


async def run_text(server: Any) -> None:
    """Runner.run"""
    result = await Runner.run(_agent(server, settings={"max_tokens": 16}), QUESTION)
    assert result.final_output


async def run_streamed(server: Any) -> None:
    """Runner.run_streamed"""
    result = Runner.run_streamed(_agent(server, settings={"max_tokens": 16}), QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds
    assert result.final_output


async def structured(server: Any) -> None:
    """Runner.run, output_type of a pydantic class"""
    result = await Runner.run(_agent(server, output_type=Forecast), QUESTION)
    assert isinstance(result.final_output, Forecast)


async def tool(server: Any) -> None:
    """Runner.run, a function as a tool and its result"""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = _agent(server, tools=[weather], settings=settings)
    result = await Runner.run(agent, QUESTION)
    kinds = [item.type for item in result.new_items]
    assert "tool_call_item" in kinds
    assert "tool_call_output_item" in kinds


async def tool_and_structured(server: Any) -> None:
    """Runner.run, a function as a tool and output_type"""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = _agent(server, tools=[weather], output_type=Forecast, settings=settings)
    result = await Runner.run(agent, QUESTION, max_turns=40)
    assert "tool_call_output_item" in [item.type for item in result.new_items]
    assert isinstance(result.final_output, Forecast)


async def tool_streamed(server: Any) -> None:
    """Runner.run_streamed, a function as a tool and its result"""
    agent = _agent(server, tools=[weather], settings={"tool_choice": "required"})
    result = Runner.run_streamed(agent, QUESTION)
    names = [event.name async for event in result.stream_events() if hasattr(event, "name")]
    assert "tool_called" in names
    assert "tool_output" in names


async def responses_run(server: Any) -> None:
    """responses.create by OpenAIResponsesModel, a pydantic class"""
    agent = _agent(server, OpenAIResponsesModel, output_type=Forecast)
    assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)


async def responses_tool(server: Any) -> None:
    """responses.create by OpenAIResponsesModel, a function as a tool and its result"""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = _agent(
        server, OpenAIResponsesModel, tools=[weather], output_type=Forecast, settings=settings
    )
    result = await Runner.run(agent, QUESTION, max_turns=40)
    assert "tool_call_output_item" in [item.type for item in result.new_items]
    assert isinstance(result.final_output, Forecast)
