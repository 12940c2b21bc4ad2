"""LiteLLM, as a library."""

import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def _call(server: Any, provider: str = "openai", **options: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{server.model}",
        api_base=server.base_url,
        api_key="none",
        messages=options.pop("messages", QUESTION),
        num_retries=0,
        **options,
    )


def completion(server: Any) -> None:
    """completion, openai/"""
    answer = _call(server, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16


def completion_hosted_vllm(server: Any) -> None:
    """completion, hosted_vllm/"""
    answer = _call(server, "hosted_vllm", max_tokens=16, top_k=5)
    assert answer.choices[0].message.content


def streamed(server: Any) -> None:
    """completion, streamed"""
    chunks = list(_call(server, max_tokens=16, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.usage.completion_tokens <= 16


async def async_completion(server: Any) -> None:
    """acompletion, streamed"""
    stream = await litellm.acompletion(
        model=f"openai/{server.model}",
        api_base=server.base_url,
        api_key="none",
        messages=QUESTION,
        max_tokens=8,
        stream=True,
    )
    assert [chunk async for chunk in stream]


def structured(server: Any) -> None:
    """completion, response_format of a pydantic class"""
    answer = _call(server, response_format=Forecast, seed=1)
    Forecast.model_validate_json(answer.choices[0].message.content)


def tools(server: Any) -> None:
    """completion, tools and the result of one"""
    answer = _call(server, tools=[WEATHER], tool_choice="required")
    message = answer.choices[0].message
    calls = message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Oslo", "Paris")
    assert answer.choices[0].finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in calls]
    following = [*QUESTION, message, *results]
    assert _call(server, messages=following, tools=[WEATHER], max_tokens=16).choices


def tools_streamed(server: Any) -> None:
    """completion, tools streamed"""
    chunks = list(_call(server, tools=[WEATHER], tool_choice="required", stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    call = rebuilt.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")


def reasoning(server: Any) -> None:
    """completion, reasoning_content"""
    regex = {"guided_regex": r"<think>[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}"}
    answer = _call(server, "hosted_vllm", extra_body=regex)
    assert answer.choices[0].message.reasoning_content
    assert answer.choices[0].message.content


def text_completion(server: Any) -> None:
    """text_completion"""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{server.model}",
        api_base=server.base_url,
        api_key="none",
        prompt="One",
        max_tokens=8,
    )
    assert answer.choices[0].text


def errors(server: Any) -> None:
    """completion, BadRequestError"""
    try:
        _call(server, temperature=9)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("temperature 9 was accepted")


def responses_create(server: Any) -> None:
    """responses.create by litellm.responses"""
    answer = litellm.responses(
        model=f"openai/{server.model}",
        api_base=server.base_url,
        api_key="none",
        input="Hello",
        max_output_tokens=16,
    )
    assert answer.output
