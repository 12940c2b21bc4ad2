"""Log-probabilities and echo, in the two shapes of the API."""

import json
from typing import Any

import pytest

from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.conftest import Stage, events
from tests.gateway.fake_engine import scores

EMOJI = "😀"


def prompt_scores(submit: Submit) -> list[Any]:
    tokens = submit.prompt.tolist()
    return [
        scores(token, -float(position), {token: -float(position), 7: -9.5}, position)
        for position, token in enumerate(tokens)
        if position > 0
    ]


async def play(stage: Stage, tokens: list[int], with_prompt: bool = False) -> Submit:
    """Answer the next request with tokens of log-probability -0.5, the alternative being 7."""
    submit = await stage.engine.accept_next()
    name = submit.request_id
    for position, token in enumerate(tokens):
        await stage.engine.step(
            {name: token},
            {name: EndFlag.LENGTH} if position == len(tokens) - 1 else {},
            {name: scores(token, -0.5, {token: -0.5, 7: -2.25})},
            {name: prompt_scores(submit)} if with_prompt and position == 0 else {},
        )
    return submit


async def test_a_completion_lists_tokens_scores_and_offsets(stage: Stage) -> None:
    text = "Good day"
    tokens = stage.tokenizer.encode(text, add_special_tokens=False)
    playing = stage.spawn(play(stage, tokens))
    answer = await stage.openai.completions.create(
        model="demo", prompt="Hello", logprobs=2, max_tokens=50
    )
    submit = await playing
    assert submit.sampling.num_logprobs == 2
    assert submit.sampling.num_prompt_logprobs is None
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == text
    assert found.token_logprobs == [-0.5] * len(tokens)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert text[offset:].startswith(token)
    assert found.top_logprobs[0] == {found.tokens[0]: -0.5, name_of(stage, 7): -2.25}


def name_of(stage: Stage, token: int) -> str:
    return stage.tokenizer.token_bytes(token).decode()


async def test_streamed_scores_are_those_of_the_whole_answer(stage: Stage) -> None:
    tokens = stage.tokenizer.encode(f"a{EMOJI}b", add_special_tokens=False)
    bodies = []
    for stream in (False, True):
        playing = stage.spawn(play(stage, tokens))
        bodies.append((await stage.complete(logprobs=1, stream=stream, max_tokens=50)).text)
        await playing
    whole = json.loads(bodies[0])["choices"][0]["logprobs"]
    chunks = [json.loads(event)["choices"][0]["logprobs"] for event in events(bodies[1])[:-1]]
    for key, values in whole.items():
        assert [value for chunk in chunks if chunk for value in chunk[key]] == values, key
    assert any(name.startswith("bytes:\\xf0") for name in whole["tokens"])


async def test_a_chat_lists_tokens_with_their_bytes(stage: Stage) -> None:
    tokens = stage.tokenizer.encode(EMOJI, add_special_tokens=False)
    playing = stage.spawn(play(stage, tokens))
    answer = await stage.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        logprobs=True,
        top_logprobs=2,
    )
    assert (await playing).sampling.num_logprobs == 2
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    data = b"".join(bytes(item.bytes or ()) for item in found.content)
    assert data.decode() == EMOJI
    assert [item.logprob for item in found.content] == [-0.5] * len(tokens)
    assert [len(item.top_logprobs) for item in found.content] == [2] * len(tokens)


async def test_a_streamed_chat_carries_scores(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("Good day", add_special_tokens=False)
    playing = stage.spawn(play(stage, tokens))
    stream = await stage.openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], logprobs=True, stream=True
    )
    names = []
    async for chunk in stream:
        found = chunk.choices[0].logprobs
        names += [item.token for item in (found.content or [])] if found else []
    assert (await playing).sampling.num_logprobs == 0
    assert "".join(names) == "Good day"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_text(stage: Stage, stream: bool) -> None:
    stage.answer_text(" world")
    response = await stage.complete(echo=True, stream=stream)
    if stream:
        chunks = [json.loads(event) for event in events(response.text)[:-1]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "Hello world"


async def test_echo_of_token_ids_shows_their_text(stage: Stage) -> None:
    stage.answer_text("!")
    prompt = stage.tokenizer.encode("Good day")
    answer = (await stage.complete(prompt=prompt, echo=True)).json()
    assert answer["choices"][0]["text"] == "Good day!"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt_too(stage: Stage, stream: bool) -> None:
    tokens = stage.tokenizer.encode("!", add_special_tokens=False)
    playing = stage.spawn(play(stage, tokens, with_prompt=True))
    response = await stage.complete(prompt="Good day", echo=True, logprobs=1, stream=stream)
    submit = await playing
    assert submit.sampling.num_prompt_logprobs == 1
    if stream:
        parts = [json.loads(event)["choices"][0] for event in events(response.text)[:-1]]
    else:
        parts = response.json()["choices"]
    found = parts[0]["logprobs"]
    prompt = submit.prompt.tolist()
    length = len(prompt) + len(tokens)
    assert "".join(part["text"] for part in parts) == "Good day!"
    assert len(found["tokens"]) == length
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    scored = found["token_logprobs"][1:]
    assert scored == [-float(position) for position in range(1, len(prompt))] + [-0.5]
    for name, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
        assert "Good day!"[offset:].startswith(name)


async def test_prompt_offsets_are_places_in_the_text_that_is_echoed(stage: Stage) -> None:
    prompt = "<|bos|>x<|eos|>y"
    tokens = stage.tokenizer.encode("!", add_special_tokens=False)
    playing = stage.spawn(play(stage, tokens, with_prompt=True))
    choice = (await stage.complete(prompt=prompt, echo=True, logprobs=0)).json()["choices"][0]
    await playing
    assert choice["text"] == f"{prompt}!"
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "<|bos|>", "x", "<|eos|>", "y", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 7, 8, 15, 16]
    # Of token ids the text alone is echoed, without special tokens.
    playing = stage.spawn(play(stage, tokens, with_prompt=True))
    prompt = stage.tokenizer.encode(prompt)
    choice = (await stage.complete(prompt=prompt, echo=True, logprobs=0)).json()["choices"][0]
    await playing
    assert choice["text"] == "xy!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2]


async def test_no_tokens_with_echo_streams_the_prompt_alone(stage: Stage) -> None:
    stage.answer_text("x")
    response = await stage.complete(prompt="Good day", echo=True, max_tokens=0, stream=True)
    [chunk, _done] = events(response.text)
    [choice] = json.loads(chunk)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Good day", "length")


async def test_no_tokens_with_echo_only_scores_the_prompt(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50], with_prompt=True))
    response = await stage.complete(prompt="Good day", echo=True, logprobs=1, max_tokens=0)
    submit = await playing
    assert submit.sampling.max_tokens == 1
    body = response.json()
    assert body["choices"][0]["text"] == "Good day"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(submit.prompt)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


async def test_scores_that_json_cannot_hold_are_written_as_very_small(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(logprobs=1))
    submit = await stage.engine.accept_next()
    name, never = submit.request_id, float("-inf")
    found = {name: scores(50, -0.5, {50: -0.5, 7: never})}
    await stage.engine.step({name: 50}, {name: EndFlag.LENGTH}, found)
    top = (await waiting).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert -9999.0 in top[0].values()


async def test_missing_prompt_scores_are_an_error_not_a_hole(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50]))
    response = await stage.complete(prompt="Good day", echo=True, logprobs=1)
    await playing
    assert response.status_code == 500


async def test_a_missing_score_is_an_error_not_a_hole(stage: Stage) -> None:
    stage.answer_text("Hi")
    assert (await stage.complete(logprobs=1)).status_code == 500
    assert (await stage.chat(logprobs=True)).status_code == 500


async def test_prompt_logprobs_stand_beside_each_text(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50], with_prompt=True))
    response = await stage.complete(prompt="Good day", prompt_logprobs=2, max_tokens=1)
    submit = await playing
    assert submit.sampling.num_prompt_logprobs == 2
    assert submit.sampling.num_logprobs is None
    [choice] = response.json()["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(submit.prompt) - 1
    for position, place in enumerate(others, 1):
        token = int(submit.prompt[position])
        text = name_of(stage, token)
        assert place == {
            str(token): {"logprob": -float(position), "rank": 1, "decoded_token": text},
            "7": {"logprob": -9.5, "rank": 2, "decoded_token": name_of(stage, 7)},
        }


async def test_a_prompt_token_that_is_none_of_the_likeliest_has_no_rank(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50], with_prompt=True))
    response = await stage.complete(prompt="Good day", prompt_logprobs=0, max_tokens=1)
    submit = await playing
    places = response.json()["choices"][0]["prompt_logprobs"][1:]
    assert [list(place) for place in places] == [[str(token)] for token in submit.prompt[1:]]
    assert {place["rank"] for each in places for place in each.values()} == {None}


async def test_echo_and_prompt_logprobs_may_differ_in_number(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50], with_prompt=True))
    response = await stage.complete(
        prompt="Good day", prompt_logprobs=2, echo=True, logprobs=1, max_tokens=1
    )
    submit = await playing
    assert submit.sampling.num_prompt_logprobs == 2
    [choice] = response.json()["choices"]
    assert {len(place) for place in choice["prompt_logprobs"][1:]} == {2}
    assert {len(place) for place in choice["logprobs"]["top_logprobs"][1:-1]} == {1}


async def test_each_text_has_those_of_its_own_prompt(stage: Stage) -> None:
    async def play_both() -> list[Submit]:
        return [await play(stage, [50], with_prompt=True) for _ in range(2)]

    prompts = [[20, 30, 40], [20, 31]]
    playing = stage.spawn(play_both())
    response = await stage.complete(prompt=prompts, prompt_logprobs=0, max_tokens=1)
    await playing
    found = [choice["prompt_logprobs"] for choice in response.json()["choices"]]
    assert [[list(place) for place in each[1:]] for each in found] == [[["30"], ["40"]], [["31"]]]


async def test_a_conversation_has_prompt_logprobs_once(stage: Stage) -> None:
    playing = stage.spawn(play(stage, [50], with_prompt=True))
    response = await stage.chat(prompt_logprobs=1, max_tokens=1)
    submit = await playing
    body = response.json()
    assert len(body["prompt_logprobs"]) == len(submit.prompt)
    assert "prompt_logprobs" not in body["choices"][0]


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"stream": True}, "leave stream out"),
        ({"use_beam_search": True, "n": 2}, "beam search"),
        ({"prompt_logprobs": 21}, "20"),
        ({"prompt_logprobs": -1}, "0"),
    ],
)
async def test_prompt_logprobs_that_cannot_be_had_are_refused(
    stage: Stage, fields: dict[str, Any], because: str
) -> None:
    response = await stage.complete(**{"prompt_logprobs": 1, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert because in error["message"]
