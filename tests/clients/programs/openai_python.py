"""openai-python."""

import json
import time
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SENTENCE = "[A-Z][a-z ]{5,20}"  # a final completion that ended by length is an error of the client
THOUGHT = r"<think>[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}"


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)
    words: list[Annotated[str, Field(max_length=20)]] = Field(max_length=2)


class Weather(BaseModel):
    """Asks for the weather of a city."""

    city: Literal["Oslo", "Paris"]


def _client(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, **options)


def models_list(server: Any) -> None:
    """models.list, retrieve"""
    client = _client(server)
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == server.model


def chat_create(server: Any) -> None:
    """chat.completions.create"""
    answer = _client(server).chat.completions.create(
        model=server.model, messages=QUESTION, max_tokens=16, n=2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 32


def chat_create_streamed(server: Any) -> None:
    """chat.completions.create, streamed"""
    chunks = list(
        _client(server).chat.completions.create(
            model=server.model,
            messages=QUESTION,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert not chunks[-1].choices


def chat_stream(server: Any) -> None:
    """chat.completions.stream"""
    with _client(server).chat.completions.stream(
        model=server.model, messages=QUESTION, extra_body={"guided_regex": SENTENCE}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def chat_parse(server: Any) -> None:
    """chat.completions.parse, a pydantic class; the conversation goes on"""
    client = _client(server)
    answer = client.chat.completions.parse(
        model=server.model, messages=QUESTION, response_format=Forecast, seed=1
    )
    message: Any = answer.choices[0].message
    assert isinstance(message.parsed, Forecast)
    assert client.chat.completions.create(
        model=server.model, messages=[*QUESTION, message, *QUESTION], max_tokens=16
    ).choices


def chat_stream_parsed(server: Any) -> None:
    """chat.completions.stream, a pydantic class"""
    with _client(server).chat.completions.stream(
        model=server.model, messages=QUESTION, response_format=Forecast, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Forecast)


def chat_json_object(server: Any) -> None:
    """chat.completions.create, json_object"""
    answer = _client(server).chat.completions.create(
        model=server.model,
        messages=QUESTION,
        response_format={"type": "json_object"},
        max_tokens=200,
        seed=1,
    )
    [choice] = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def chat_tools(server: Any) -> None:
    """chat.completions.create, tools and the result of one"""
    client = _client(server)
    messages = list(QUESTION)
    answer = client.chat.completions.create(
        model=server.model,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls", choice
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")
    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    answer = client.chat.completions.create(
        model=server.model, messages=messages, tools=[WEATHER], max_tokens=16
    )
    assert answer.choices[0].message.role == "assistant"


def chat_tools_streamed(server: Any) -> None:
    """chat.completions.create, tools streamed"""
    name, arguments, ends = "", "", []
    for chunk in _client(server).chat.completions.create(
        model=server.model,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    ):
        choice = chunk.choices[0]
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "weather"
    assert json.loads(arguments)["days"] in range(1, 10)
    assert ends == ["tool_calls"]


def chat_stream_tools(server: Any) -> None:
    """chat.completions.stream, a pydantic class as the tool"""
    with _client(server).chat.completions.stream(
        model=server.model,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def chat_parse_tools(server: Any) -> None:
    """chat.completions.parse, a pydantic class as the tool, and its result"""
    client = _client(server)
    answer = client.chat.completions.parse(
        model=server.model,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    messages = [*QUESTION, message]
    for call in message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, Weather)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    assert client.chat.completions.create(
        model=server.model, messages=messages, tools=[WEATHER], max_tokens=16
    ).choices


def chat_reasoning(server: Any) -> None:
    """chat.completions.create, reasoning_content"""
    client = _client(server)
    body: Any = {"model": server.model, "messages": QUESTION}
    body["extra_body"] = {"guided_regex": THOUGHT}
    message: Any = client.chat.completions.create(**body).choices[0].message
    assert message.reasoning_content
    assert message.content
    streamed = ""
    for chunk in client.chat.completions.create(**body, stream=True):
        streamed += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert streamed


def completions_create(server: Any) -> None:
    """completions.create"""
    answer = _client(server).completions.create(
        model=server.model, prompt=["One", "Two"], max_tokens=8, logprobs=1, echo=True, stop="!"
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One")
    assert answer.choices[0].logprobs is not None


def completions_streamed(server: Any) -> None:
    """completions.create, streamed"""
    chunks = _client(server).completions.create(
        model=server.model, prompt="One", max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks)


async def async_client(server: Any) -> None:
    """AsyncOpenAI, streamed"""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model=server.model, messages=QUESTION, max_tokens=8, stream=True
        )
        assert [chunk async for chunk in stream]


def raw_response(server: Any) -> None:
    """with_raw_response"""
    raw = _client(server).chat.completions.with_raw_response.create(
        model=server.model, messages=QUESTION, max_tokens=2
    )
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse().choices


def errors(server: Any) -> None:
    """errors: BadRequestError, NotFoundError"""
    client = _client(server)
    try:
        client.chat.completions.create(model=server.model, messages=QUESTION, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
    else:
        raise AssertionError("temperature 9 was accepted")
    for call in (
        lambda: client.embeddings.create(model=server.model, input="x"),
        lambda: client.models.retrieve("no-such-model"),
    ):
        try:
            call()
        except openai.NotFoundError:
            continue
        raise AssertionError("an answer to a call that has none")


def responses_create(server: Any) -> None:
    """responses.create"""
    client = _client(server)
    answer = client.responses.create(
        model=server.model, input="Hello", instructions="Be brief.", max_output_tokens=16
    )
    assert answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    following = client.responses.create(
        model=server.model, input="And?", previous_response_id=answer.id, max_output_tokens=16
    )
    assert following.previous_response_id == answer.id


def responses_streamed(server: Any) -> None:
    """responses.create, streamed"""
    events = _client(server).responses.create(
        model=server.model, input="Hello", max_output_tokens=16, stream=True
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def responses_stream(server: Any) -> None:
    """responses.stream"""
    with _client(server).responses.stream(
        model=server.model, input="Hello", max_output_tokens=16
    ) as stream:
        assert [event.type for event in stream]


def responses_parse(server: Any) -> None:
    """responses.parse, a pydantic class"""
    answer = _client(server).responses.parse(
        model=server.model, input="Hello", text_format=Forecast
    )
    assert isinstance(answer.output_parsed, Forecast)


def responses_tools(server: Any) -> None:
    """responses.create, tools"""
    tool: Any = {"type": "function", **WEATHER["function"]}
    answer = _client(server).responses.create(
        model=server.model, input="Hello", tools=[tool], tool_choice="required"
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments)["city"] in ("Oslo", "Paris")


def responses_background(server: Any) -> None:
    """responses.create, background, and retrieve with starting_after"""
    client = _client(server)
    answer = client.responses.create(
        model=server.model, input="Hello", max_output_tokens=64, background=True
    )
    events = list(client.responses.retrieve(answer.id, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    middle = events[len(events) // 2].sequence_number
    rest = list(client.responses.retrieve(answer.id, stream=True, starting_after=middle))
    assert [event.sequence_number for event in rest] == [
        event.sequence_number for event in events if event.sequence_number > middle
    ]
    client.responses.delete(answer.id)


def batches_completed(server: Any) -> None:
    """batches.create, retrieve and list; files.create, content, list and delete"""
    client = _client(server)
    made = _batch(server, client, [{}, {}, {"temperature": 9}])
    assert made.id in [found.id for found in client.batches.list(limit=20)]
    batch = _ended(client, made.id)
    assert batch.status == "completed", batch
    texts = [
        client.files.content(name).text for name in (batch.output_file_id, batch.error_file_id)
    ]
    answers, errors = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert sorted(row["custom_id"] for row in answers) == ["0", "1"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    names = {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    assert names <= {found.id for found in client.files.list()}
    for name in names:
        assert client.files.delete(name).deleted


def batches_cancelled(server: Any) -> None:
    """batches.cancel"""
    client = _client(server)
    made = _batch(server, client, [{"max_tokens": 64}] * 200)
    client.batches.cancel(made.id)
    assert _ended(client, made.id).status == "cancelled"


def _batch(server: Any, client: openai.OpenAI, bodies: list[dict[str, Any]]) -> Any:
    url: Any = "/v1/chat/completions"
    asked = {"model": server.model, "messages": QUESTION, "max_tokens": 16}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": asked | body})
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def _ended(client: openai.OpenAI, batch_id: str) -> Any:
    for _ in range(600):
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.1)  # polling interval of the condition
    raise AssertionError(f"the batch does not end: {batch}")
