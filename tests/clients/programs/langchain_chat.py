"""LangChain's ChatOpenAI."""

from typing import Any, Literal, TypedDict

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the weather in Oslo?"


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


class City(TypedDict):
    """A city."""

    city: Literal["Oslo", "Paris"]


@tool
def weather(city: Literal["Oslo", "Paris"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def _model(server: Any, **options: Any) -> ChatOpenAI:
    options = {"max_tokens": 400, "temperature": 0.7, "seed": 1, **options}
    return ChatOpenAI(
        base_url=server.base_url, api_key="none", model=server.model, max_retries=0, **options
    )


def invoke(server: Any) -> None:
    """ChatOpenAI.invoke"""
    answer = _model(server, max_tokens=16).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16


def streamed(server: Any) -> None:
    """ChatOpenAI.stream"""
    parts = list(_model(server, max_tokens=16, stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts)
    assert any(part.usage_metadata for part in parts)


async def async_streamed(server: Any) -> None:
    """ChatOpenAI.astream"""
    assert [part async for part in _model(server, max_tokens=16).astream(QUESTION)]


def batched(server: Any) -> None:
    """ChatOpenAI.batch"""
    assert len(_model(server, max_tokens=8).batch([QUESTION, "And in Paris?", "Hello"])) == 3


def structured_json_schema(server: Any) -> None:
    """with_structured_output, json_schema"""
    answer = _model(server).with_structured_output(Forecast, method="json_schema")
    assert isinstance(answer.invoke(QUESTION), Forecast)


def structured_strict(server: Any) -> None:
    """with_structured_output, json_schema, strict"""
    answer = _model(server).with_structured_output(Forecast, method="json_schema", strict=True)
    assert isinstance(answer.invoke(QUESTION), Forecast)


def structured_function_calling(server: Any) -> None:
    """with_structured_output, function_calling"""
    answer = _model(server).with_structured_output(Forecast, method="function_calling")
    assert isinstance(answer.invoke(QUESTION), Forecast)


def structured_typed_dict(server: Any) -> None:
    """with_structured_output, a TypedDict, streamed"""
    parts = list(_model(server).with_structured_output(City, strict=True).stream(QUESTION))
    assert parts[-1]["city"] in ("Oslo", "Paris")


def tools(server: Any) -> None:
    """bind_tools, and the result of a tool"""
    bound = _model(server).bind_tools([weather], tool_choice="weather", strict=True)
    answer = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert call["args"]["city"] in ("Oslo", "Paris")
    messages = [HumanMessage(QUESTION), answer, weather.invoke(call)]
    assert isinstance(messages[-1], ToolMessage)
    again = _model(server, max_tokens=16).bind_tools([weather]).invoke(messages)
    assert isinstance(again, AIMessage)


def tools_streamed(server: Any) -> None:
    """bind_tools, streamed"""
    bound = _model(server).bind_tools(
        [weather], tool_choice="any", parallel_tool_calls=False, strict=True
    )
    whole: Any = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    [call] = whole.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Oslo", "Paris")


def completion(server: Any) -> None:
    """OpenAI.invoke and stream (completions)"""
    model = OpenAI(
        base_url=server.base_url, api_key="none", model=server.model, max_tokens=8, max_retries=0
    )
    assert model.invoke("One") is not None
    assert list(model.stream("One"))


def _responses(server: Any, **options: Any) -> ChatOpenAI:
    return _model(server, use_responses_api=True, seed=None, **options)


def responses_invoke(server: Any) -> None:
    """responses.create by ChatOpenAI(use_responses_api=True).invoke and stream"""
    assert _responses(server, max_tokens=16).invoke(QUESTION).content
    assert list(_responses(server, max_tokens=16).stream(QUESTION))


def responses_structured(server: Any) -> None:
    """responses.create by with_structured_output"""
    answer = _responses(server).with_structured_output(Forecast).invoke(QUESTION)
    assert isinstance(answer, Forecast)


def responses_tools(server: Any) -> None:
    """responses.create by bind_tools, and the result of a tool"""
    bound = _responses(server).bind_tools([weather], tool_choice="weather", strict=True)
    answer = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert call["args"]["city"] in ("Oslo", "Paris")
    messages = [HumanMessage(QUESTION), answer, weather.invoke(call)]
    assert _responses(server, max_tokens=16).bind_tools([weather]).invoke(messages)
