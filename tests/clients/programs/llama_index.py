"""LlamaIndex's OpenAILike."""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, Field

QUESTION = "What is the weather in Oslo?"


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def _model(server: Any, **options: Any) -> OpenAILike:
    options = {"max_tokens": 16, "is_chat_model": True, **options}
    return OpenAILike(
        model=server.model, api_base=server.base_url, api_key="none", max_retries=0, **options
    )


def chat(server: Any) -> None:
    """chat"""
    answer = _model(server).chat([ChatMessage(role="user", content=QUESTION)])
    assert answer.message.content


def stream_chat(server: Any) -> None:
    """stream_chat"""
    parts = list(_model(server).stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert parts[-1].message.content


def complete(server: Any) -> None:
    """complete, stream_complete"""
    model = _model(server, is_chat_model=False)
    assert model.complete("One").text
    assert list(model.stream_complete("One"))


async def async_chat(server: Any) -> None:
    """astream_chat"""
    stream = await _model(server).astream_chat([ChatMessage(role="user", content=QUESTION)])
    assert [part async for part in stream]


def structured(server: Any) -> None:
    """as_structured_llm, by response_format"""
    model = _model(server, max_tokens=200, should_use_structured_outputs=True)
    answer = model.as_structured_llm(Forecast).complete(QUESTION)
    assert isinstance(answer.raw, Forecast)


def structured_by_tool(server: Any) -> None:
    """as_structured_llm, by a tool"""
    model = _model(server, max_tokens=200, is_function_calling_model=True)
    answer = model.as_structured_llm(Forecast).complete(QUESTION)
    assert isinstance(answer.raw, Forecast)


def tools(server: Any) -> None:
    """chat_with_tools"""

    def weather(city: Literal["Oslo", "Paris"]) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    model = _model(server, max_tokens=200, is_function_calling_model=True)
    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True
    )
    calls = model.get_tool_calls_from_response(answer)
    assert calls[0].tool_kwargs["city"] in ("Oslo", "Paris")


def responses_chat(server: Any) -> None:
    """responses.create by OpenAILikeResponses"""
    model = OpenAILikeResponses(
        model=server.model,
        api_base=server.base_url,
        api_key="none",
        max_output_tokens=16,
        max_retries=0,
        context_window=2048,
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content
    assert list(model.stream_chat(messages))
