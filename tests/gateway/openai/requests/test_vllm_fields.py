"""Fields that clients of vLLM send."""

import json
from typing import Any

import pytest

from shared.messages.endings import EndFlag
from shared.messages.requests import Submit
from tests.gateway.conftest import Stage, events
from tests.gateway.fake_engine import INFO, scores


@pytest.mark.parametrize(
    ("stop", "shown"), [("STOP", "one STOP"), (["e S", "STOP"], "one S"), ("none", "one STOP two")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_may_stand_at_the_end_of_the_text(
    stage: Stage, stop: Any, shown: str, stream: bool
) -> None:
    stage.answer_text("one STOP two")
    for way in (stage.complete, stage.chat):
        response = await way(
            stop=stop, include_stop_str_in_output=True, max_tokens=60, stream=stream
        )
        assert text_of(response.text, stream) == shown
    response = await stage.complete(stop="STOP", include_stop_str_in_output=False, max_tokens=60)
    assert response.json()["choices"][0]["text"] == "one "


def text_of(answer: str, stream: bool) -> str:
    datas = [json.loads(data) for data in events(answer)[:-1]] if stream else [json.loads(answer)]
    text = ""
    for data in datas:
        for choice in data["choices"]:
            message = choice.get("delta", choice.get("message", {}))
            text += choice.get("text", "") + message.get("content", "")
    return text


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_is_shown_like_a_stop_string(stage: Stage, include: bool) -> None:
    tokens = stage.tokenizer.encode("one two", add_special_tokens=False)
    stage.answer(lambda _: tokens, flag=EndFlag.STOP)
    response = await stage.complete(
        stop_token_ids=[tokens[-1]],
        include_stop_str_in_output=include,
        return_token_ids=True,
        max_tokens=60,
    )
    [choice] = response.json()["choices"]
    assert choice["text"] == stage.tokenizer.decode(tokens if include else tokens[:-1])
    assert choice["token_ids"] == tokens


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_chunk_may_have_the_usage_so_far(stage: Stage, path: str) -> None:
    tokens = stage.tokenizer.encode("one two three", add_special_tokens=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"model": "demo", "stream": True, "stream_options": options}
    body |= {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    del body["messages" if path == "/v1/completions" else "prompt"]
    accepting = stage.spawn(stage.engine.accept_next())
    usages = []
    async with stage.http.stream("POST", path, json=body) as response:
        submit = await accepting
        lines = response.aiter_lines()
        for number, token in enumerate(tokens):
            flag = EndFlag.LENGTH if number == len(tokens) - 1 else None
            await stage.engine.generate(submit, [token], flag)
            async for line in lines:  # as far as this token has brought any
                if line.startswith("data: {"):
                    usages.append(json.loads(line.removeprefix("data: "))["usage"])
                    if '"role"' not in line:  # that one comes before the first text of a chat
                        break
        async for line in lines:
            if line.startswith("data: {"):
                usages.append(json.loads(line.removeprefix("data: "))["usage"])
    assert {usage["completion_tokens"] for usage in usages} == set(range(1, len(tokens) + 1))
    assert {usage["prompt_tokens"] for usage in usages} == {len(submit.prompt)}
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)


async def test_usage_in_chunks_needs_usage_at_all(stage: Stage) -> None:
    stage.answer_text("Hi")
    alone = await stage.complete(stream=True, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in json.loads(data) for data in events(alone.text)[:-1])


@pytest.mark.parametrize(("most", "kept"), [(3, 3), (256, 40), (-1, 40), (40, 40)])
async def test_of_a_prompt_that_is_too_long_the_end_is_kept(
    stage: Stage, most: int, kept: int
) -> None:
    prompt = list(range(100, 140))
    stage.answer(lambda _: [50])
    response = await stage.complete(
        prompt=prompt, truncate_prompt_tokens=most, echo=True, return_token_ids=True, max_tokens=1
    )
    [choice] = response.json()["choices"]
    assert choice["prompt_token_ids"] == prompt[-kept:]
    assert choice["text"] == stage.tokenizer.decode([*prompt[-kept:], 50])
    assert response.json()["usage"]["prompt_tokens"] == kept


async def test_minus_one_keeps_what_leaves_room_for_the_output(stage: Stage) -> None:
    context = INFO.model.max_model_len
    received: list[int] = []

    def reply(submit: Submit) -> list[int]:
        received.append(len(submit.prompt))
        return [50]

    stage.answer(reply)
    prompt = [100] * (context + 50)
    messages = [{"role": "user", "content": "word " * context}]
    assert (await stage.complete(prompt=prompt)).status_code == 400
    for body in ({"max_tokens": 10}, {}):
        response = await stage.complete(prompt=prompt, truncate_prompt_tokens=-1, **body)
        assert response.status_code == 200
    for body in ({"max_tokens": 10}, {"max_completion_tokens": 20}, {}):
        response = await stage.chat(messages=messages, truncate_prompt_tokens=-1, **body)
        assert response.status_code == 200
    assert received == [context - room for room in (10, 16, 10, 20, 1)]


async def score_all(stage: Stage) -> Submit:
    """Answer a request with log-probabilities of minus the position."""
    submit = await stage.engine.accept_next()
    name, tokens = submit.request_id, submit.prompt.tolist()
    [forced] = submit.sampling.logit_bias
    found = [scores(t, -float(p), {t: -float(p), 7: -999.0}, p) for p, t in enumerate(tokens)]
    last = scores(forced.token, -float(len(tokens)), {forced.token: -float(len(tokens)), 7: -999.0})
    await stage.engine.step(
        {name: forced.token},
        {name: EndFlag.LENGTH},
        {name: last} if submit.sampling.num_logprobs is not None else {},
        {name: found[1:]} if submit.sampling.num_prompt_logprobs is not None else {},
    )
    return submit


@pytest.mark.parametrize("stream", [False, True])
async def test_as_many_tokens_as_the_context_has_are_scored(stage: Stage, stream: bool) -> None:
    context = INFO.model.max_model_len
    prompt = [100 + number for number in range(context)]
    playing = stage.spawn(score_all(stage))
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    response = await stage.complete(**asked, stream=stream, temperature=1.5, stop_token_ids=[5])
    submit = await playing
    assert submit.prompt.tolist() == prompt[:-1]
    assert submit.sampling.is_greedy
    assert submit.sampling.stop_token_ids == ()
    answer = json.loads(events(response.text)[0] if stream else response.text)
    [choice] = answer["choices"]
    assert choice["text"] == stage.tokenizer.decode(prompt)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(p) for p in range(1, context))]
    if not stream:
        assert answer["usage"]["prompt_tokens"] == context
        assert answer["usage"]["completion_tokens"] == 0


async def test_a_full_context_has_prompt_logprobs_without_an_echo(stage: Stage) -> None:
    context = INFO.model.max_model_len
    prompt = [100 + number for number in range(context)]
    playing = stage.spawn(score_all(stage))
    response = await stage.complete(prompt=prompt, max_tokens=0, prompt_logprobs=1)
    await playing
    [choice] = response.json()["choices"]
    assert choice["text"] == ""
    places = choice["prompt_logprobs"]
    assert len(places) == context
    assert places[-1][str(prompt[-1])]["logprob"] == -float(context - 1)
    for body in ({"max_tokens": 1}, {"use_beam_search": True, "n": 2, "max_tokens": 0}):
        assert (await stage.complete(prompt=prompt, echo=True, **body)).status_code == 400
    longer = await stage.complete(prompt=[*prompt, 1], max_tokens=0, echo=True)
    assert longer.json()["error"]["code"] == "context_length_exceeded"


async def test_another_token_than_the_prompts_last_is_an_error(stage: Stage) -> None:
    prompt = [100 + number for number in range(INFO.model.max_model_len)]
    stage.answer(lambda _: [50])
    response = await stage.complete(prompt=prompt, max_tokens=0, echo=True)
    assert response.status_code == 500
