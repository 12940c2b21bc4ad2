"""Completions and chats as the official client sees them."""

import json
from typing import Any

import pytest

from shared.messages.endings import EndFlag
from tests.gateway.conftest import Stage, events

TEXT = "It was a fine day 😀, and “she” said so."


async def test_a_whole_completion_has_text_usage_and_finish_reason(stage: Stage) -> None:
    stage.answer_text(TEXT)
    answer = await stage.openai.completions.create(model="demo", prompt="Hello", max_tokens=200)
    tokens = stage.tokenizer.encode(TEXT, add_special_tokens=False)
    [choice] = answer.choices
    assert choice.text == TEXT
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(stage.tokenizer.encode("Hello"))
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(tokens)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_completion_concatenates_to_the_same_text(stage: Stage) -> None:
    stage.answer_text(TEXT, flag=EndFlag.STOP)
    stream = await stage.openai.completions.create(
        model="demo",
        prompt="Hello",
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in texts[:-1]] == [None] * (len(texts) - 1)
    assert texts[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in texts)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(stage.tokenizer.encode(TEXT, False))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(chunk.choices[0].text for chunk in texts)


async def test_a_whole_chat_answers_as_the_assistant(stage: Stage) -> None:
    stage.answer_text(TEXT, flag=EndFlag.STOP)
    answer = await stage.openai.chat.completions.create(
        model="demo",
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "Ann"},
        ],
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(stage: Stage) -> None:
    stage.answer_text(TEXT)
    stream = await stage.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *middle, last, usage = [chunk async for chunk in stream]
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == TEXT
    assert {chunk.choices[0].finish_reason for chunk in [first, *middle]} == {None}
    assert last.choices[0].delta.content is None
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert len({chunk.id for chunk in [first, *middle, last, usage]}) == 1
    assert {chunk.object for chunk in [first, last]} == {"chat.completion.chunk"}


async def test_a_stream_ends_with_done(stage: Stage) -> None:
    stage.answer_text("Hi")
    response = await stage.complete(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert last == "[DONE]"
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


async def test_the_answer_to_a_chat_is_prompted_by_the_template_with_one_bos(stage: Stage) -> None:
    waiting = stage.spawn(stage.chat())
    submit = await stage.engine.accept_next()
    text = stage.tokenizer.decode(submit.prompt.tolist(), skip_special=False)
    assert text == "<|bos|><|user|>Hello<|assistant|>"
    await stage.engine.generate(submit, [50])
    await waiting


async def test_several_prompts_are_answered_under_their_indexes(stage: Stage) -> None:
    stage.answer(lambda submit: submit.prompt.tolist()[1:])
    tokenizer = stage.tokenizer
    answer = await stage.openai.completions.create(
        model="demo", prompt=["Hello", "Good day", "Farewell"], max_tokens=50
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["Hello", "Good day", "Farewell"]
    lists = [tokenizer.encode(text) for text in ("One", "Two words")]
    stream = await stage.openai.completions.create(model="demo", prompt=lists, stream=True)
    texts = {0: "", 1: ""}
    reasons = []
    async for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons.append(choice.finish_reason)
    assert texts == {0: "One", 1: "Two words"}
    assert reasons.count("length") == 2
    ids = {submit.request_id for submit in stage.engine.received}  # type: ignore[attr-defined]
    assert len(ids) == 5


async def test_a_prompt_of_token_ids_is_taken_as_it_is(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=[7, 8, 9]))
    submit = await stage.engine.accept_next()
    assert submit.prompt.tolist() == [7, 8, 9]
    await stage.engine.generate(submit, [50])
    assert (await waiting).json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", ["", [[]]])
async def test_an_empty_prompt_becomes_bos(stage: Stage, prompt: Any) -> None:
    waiting = stage.spawn(stage.complete(prompt=prompt))
    submit = await stage.engine.accept_next()
    assert submit.prompt.tolist() == [stage.tokenizer.bos_token_id]
    await stage.engine.generate(submit, [50])
    assert (await waiting).status_code == 200


async def test_names_of_special_tokens_in_a_text_become_those_tokens(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt="a<|eos|>b"))
    submit = await stage.engine.accept_next()
    assert 1 in submit.prompt.tolist()
    await stage.engine.generate(submit, [50])
    assert (await waiting).status_code == 200


async def test_sampling_parameters_reach_the_engine(stage: Stage) -> None:
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 99,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    waiting = stage.spawn(stage.complete(**given, user="somebody"))
    submit = await stage.engine.accept_next()
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(submit.sampling, name) == expected, name
    assert submit.sampling.num_logprobs is None
    assert submit.sampling.num_prompt_logprobs is None
    await stage.engine.generate(submit, [50])
    await waiting


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0}, "top_p", 2.0**-126),
        ({"top_p": 1e-300}, "top_p", 2.0**-126),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"seed": -(2**63)}, "seed", 0),
    ],
)
async def test_values_that_openai_allows_reach_the_engine_in_its_form(
    stage: Stage, given: dict[str, Any], name: str, expected: float
) -> None:
    waiting = stage.spawn(stage.complete(**given))
    submit = await stage.engine.accept_next()
    assert getattr(submit.sampling, name) == expected
    await stage.engine.generate(submit, [50])
    await waiting


async def test_defaults_are_those_of_openai_and_seeds_are_drawn(stage: Stage) -> None:
    waiting = [stage.spawn(stage.complete()) for _ in range(2)]
    submits = [await stage.engine.accept_next() for _ in range(2)]
    for submit in submits:
        assert submit.sampling.max_tokens == 16
        assert submit.sampling.temperature == 1.0
        assert submit.sampling.top_p == 1.0
        assert submit.sampling.top_k == 0
        assert len(bytes.fromhex(submit.request_id)) == 16
        await stage.engine.generate(submit, [50])
    assert submits[0].sampling.seed != submits[1].sampling.seed
    for task in waiting:
        await task


async def test_a_chat_may_fill_the_rest_of_the_context(stage: Stage) -> None:
    waiting = stage.spawn(stage.chat())
    submit = await stage.engine.accept_next()
    assert submit.sampling.max_tokens == 256 - len(submit.prompt)
    await stage.engine.generate(submit, [50])
    await waiting


async def test_the_default_is_clamped_to_the_context(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=[9] * 250))
    submit = await stage.engine.accept_next()
    assert submit.sampling.max_tokens == 6
    await stage.engine.generate(submit, [50])
    await waiting


async def test_max_completion_tokens_is_understood(stage: Stage) -> None:
    waiting = stage.spawn(stage.chat(max_completion_tokens=5, max_tokens=5))
    submit = await stage.engine.accept_next()
    assert submit.sampling.max_tokens == 5
    await stage.engine.generate(submit, [50])
    await waiting


async def test_neutral_values_of_unsupported_fields_are_accepted(stage: Stage) -> None:
    stage.answer_text("Hi")
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "suffix": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {"run": "7"},
        "store": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "echo": False,
        "top_k": -1,
        "stream": True,
        "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False},
        "use_beam_search": False,
        "length_penalty": 1,
        "early_stopping": False,
    }
    assert (await stage.complete(**neutral)).status_code == 200
    assert (await stage.chat(**neutral)).status_code == 200


async def test_token_ids_are_returned_on_request(stage: Stage) -> None:
    tokens = stage.tokenizer.encode(TEXT, add_special_tokens=False)
    stage.answer_text(TEXT)
    prompt = stage.tokenizer.encode("Hello")
    whole = (await stage.complete(return_token_ids=True, max_tokens=100)).json()
    assert whole["choices"][0]["token_ids"] == tokens
    assert whole["choices"][0]["prompt_token_ids"] == prompt
    response = await stage.complete(return_token_ids=True, max_tokens=100, stream=True)
    chunks = [json.loads(event)["choices"][0] for event in events(response.text)[:-1]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens
    assert chunks[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    chat = (await stage.chat(return_token_ids=True)).json()
    assert chat["choices"][0]["token_ids"] == tokens
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    response = await stage.chat(return_token_ids=True, stream=True)
    parsed = [json.loads(event) for event in events(response.text)[:-1]]
    assert parsed[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    streamed = [token for chunk in parsed for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == tokens
