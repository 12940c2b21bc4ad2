"""Answers of beam searches: all choices at once, best first, each with its score."""

import json
from typing import Any

import pytest

from tests.gateway.beam_searches import answer_search
from tests.gateway.conftest import Stage, events
from tests.gateway.event_streams import tokens_of
from tests.gateway.fake_engine import hypothesis


@pytest.mark.parametrize("best_of", [None, 2])
async def test_a_whole_completion_has_its_beams_best_first(
    stage: Stage, best_of: int | None
) -> None:
    answering = stage.spawn(answer_search(stage, "A good day", "A day"))
    answer = await stage.openai.completions.create(
        model="demo",
        prompt="Hello",
        n=2,
        best_of=best_of,
        max_tokens=50,
        extra_body={"use_beam_search": True, "return_token_ids": True},
    )
    await answering
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == ["A good day", "A day"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    extras = [choice.model_extra or {} for choice in answer.choices]
    assert [extra["beam_score"] for extra in extras] == [-1.0, -2.0]
    found = [tokens_of(stage, text) for text in ("A good day", "A day")]
    assert [extra["token_ids"] for extra in extras] == found
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(found[0]) + len(found[1])
    assert answer.usage.prompt_tokens == len(stage.tokenizer.encode("Hello"))


async def test_a_whole_chat_has_its_beams_best_first(stage: Stage) -> None:
    answering = stage.spawn(answer_search(stage, "Yes", "No, never"))
    answer = await stage.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        n=2,
        extra_body={"use_beam_search": True},
    )
    await answering
    assert [choice.message.content for choice in answer.choices] == ["Yes", "No, never"]
    assert [(choice.model_extra or {})["beam_score"] for choice in answer.choices] == [-1.0, -2.0]


@pytest.mark.parametrize("best_of", [None, 2])
async def test_a_streamed_completion_has_each_choice_in_one_piece(
    stage: Stage, best_of: int | None
) -> None:
    answering = stage.spawn(answer_search(stage, "A good day 😀", "A day"))
    response = await stage.complete(
        use_beam_search=True,
        n=2,
        best_of=best_of,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    await answering
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "A good day 😀"),
        (1, "A day"),
    ]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    assert [choice["beam_score"] for choice in choices] == [-1.0, -2.0]
    num_tokens = sum(len(choice["token_ids"]) for choice in choices)
    assert json.loads(usage)["usage"]["completion_tokens"] == num_tokens


async def test_a_streamed_chat_has_the_score_beside_the_finish_reason(
    stage: Stage,
) -> None:
    answering = stage.spawn(answer_search(stage, "Yes", "No, never"))
    stream = await stage.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        n=2,
        stream=True,
        extra_body={"use_beam_search": True},
    )
    seen: list[tuple[int, str | None, str | None, float | None]] = []
    async for chunk in stream:
        [choice] = chunk.choices
        score = (choice.model_extra or {}).get("beam_score")
        seen.append((choice.index, choice.delta.content, choice.finish_reason, score))
    await answering
    assert seen == [
        (0, "", None, None),
        (0, "Yes", None, None),
        (0, None, "stop", -1.0),
        (1, "", None, None),
        (1, "No, never", None, None),
        (1, None, "stop", -2.0),
    ]


async def test_each_of_several_prompts_has_a_search_of_its_own(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, prompt=[[5], [6, 7]], n=2))
    submits = [await stage.engine.read_submit() for _ in range(2)]
    await answer_search(stage, "c", "d", submit=submits[1])
    await answer_search(stage, "a", "b", submit=submits[0])
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == list("abcd")
    assert [choice["beam_score"] for choice in choices] == [-1.0, -2.0, -1.0, -2.0]


async def test_echo_stands_before_every_beam(stage: Stage) -> None:
    answering = stage.spawn(answer_search(stage, " you", " me"))
    choices = (await stage.complete(use_beam_search=True, n=2, echo=True)).json()["choices"]
    await answering
    assert [choice["text"] for choice in choices] == ["Hello you", "Hello me"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_scores_the_tokens_of_its_beams(stage: Stage, stream: bool) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2, logprobs=0, stream=stream))
    submit = await stage.engine.accept_search()
    assert submit.sampling.num_logprobs == 0
    tokens = tokens_of(stage, "ab"), tokens_of(stage, "c")
    sums = [-0.25 * position for position in range(1, len(tokens[0]) + 1)]
    await stage.engine.end_search(
        submit, hypothesis(tokens[0], sums), hypothesis(tokens[1], [-3.0], -3.0)
    )
    response = await waiting
    if stream:
        choices = [json.loads(chunk)["choices"][0] for chunk in events(response.text)[:-1]]
    else:
        choices = response.json()["choices"]
    first, second = (choice["logprobs"] for choice in choices)
    assert "".join(first["tokens"]) == "ab"
    assert first["token_logprobs"] == [-0.25] * len(tokens[0])
    assert second == {
        "tokens": ["c"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"c": -3.0}],
        "text_offset": [0],
    }


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
async def test_a_chat_scores_the_tokens_of_its_beams(stage: Stage, top: dict[str, Any]) -> None:
    waiting = stage.spawn(stage.chat(use_beam_search=True, logprobs=True, **top))
    submit = await stage.engine.accept_search()
    await stage.engine.end_search(submit, hypothesis(tokens_of(stage, "c"), [-3.0]))
    [choice] = (await waiting).json()["choices"]
    expected = {"token": "c", "logprob": -3.0, "bytes": [ord("c")], "top_logprobs": []}
    assert choice["logprobs"]["content"] == [expected]


async def test_cached_tokens_are_those_of_the_first_admission_of_the_group(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2, prompt=[5, 6, 7, 8]))
    submit = await stage.engine.accept_search()
    await stage.engine.step({}, admitted={submit.request_id: 2})
    await stage.engine.step({}, admitted={submit.request_id: 3})
    await stage.engine.end_search(submit, hypothesis([50]), hypothesis([51]))
    usage = (await waiting).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_search_has_a_first_token_and_no_time_between_tokens(stage: Stage) -> None:
    answering = stage.spawn(answer_search(stage, "A good day", "A day"))
    body = (await stage.complete(use_beam_search=True, n=2)).json()
    await answering
    text = (await stage.http.get("/metrics")).text

    def value(name: str) -> float:
        [line] = [line for line in text.splitlines() if line.partition("{")[0].endswith(name)]
        return float(line.rpartition(" ")[2])

    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 0
    assert value("e2e_request_latency_seconds_count") == 1
    assert value("request_generation_tokens_sum") == body["usage"]["completion_tokens"]
    ended = [line for line in text.splitlines() if 'finished_reason="stop"' in line]
    assert [line.rpartition(" ")[2] for line in ended if "_total{" in line] == ["2.0"]
    assert [type(message).__name__ for message in stage.engine.received] == ["Submit"]
    assert stage.model.engine.num_open == 0


# --------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("stream", [False, True])
async def test_a_search_continues_in_new_epochs_with_any_beams(stage: Stage, stream: bool) -> None:
    engine = stage.engine
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2, stream=stream))
    submit = await engine.accept_search()
    await engine.step({})
    await engine.start_epoch()
    await engine.append(engine.search_state(submit, [5, 6], [5, 7], [8, 9], finished=[[5, 1]]))
    await engine.step({})
    await engine.start_epoch()
    await engine.append(engine.search_state(submit, finished=[[5, 1], [7, 1]]))
    await engine.step({})
    found = [hypothesis(tokens_of(stage, text)) for text in ("one", "two")]
    await engine.end_search(submit, *found)
    response = await waiting
    if stream:
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    else:
        choices = response.json()["choices"]
    assert [choice["text"] for choice in choices] == ["one", "two"]


async def test_a_search_that_the_log_has_lost_is_attached_to(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2))
    await stage.engine.accept_search()
    await stage.engine.start_epoch()
    await stage.engine.step({})
    attach = await stage.engine.read_attach()
    assert attach.submit is not None
    assert (attach.views, attach.attachment) == ((), attach.submit.attachment)
    submit = await stage.engine.accept_search(attach.submit)
    tokens = stage.tokenizer.encode("found", add_special_tokens=False)
    await stage.engine.end_search(submit, hypothesis(tokens), hypothesis(tokens))
    assert (await waiting).json()["choices"][0]["text"] == "found"


async def test_a_failed_search_ends_its_stream_with_an_error_and_no_done(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2, stream=True))
    submit = await stage.engine.accept_search()
    await stage.engine.end(submit, "error", "out of luck")
    [last] = events((await waiting).text)
    assert json.loads(last)["error"]["message"] == "out of luck"


@pytest.mark.parametrize("num_found", [0, 1, 3])
async def test_a_wrong_number_of_hypotheses_is_an_error(stage: Stage, num_found: int) -> None:
    waiting = stage.spawn(stage.complete(use_beam_search=True, n=2))
    submit = await stage.engine.accept_search()
    await stage.engine.end_search(submit, *[hypothesis([50])] * num_found)
    response = await waiting
    assert response.status_code == 500
    assert f"{num_found} hypotheses, not 2" in response.json()["error"]["message"]
    stage.answer_text("Hi")
    assert (await stage.complete()).status_code == 200
    # The engine ended the search by itself, so no Abort is sent.
    assert [type(message).__name__ for message in stage.engine.received] == [
        "Submit",
        "Submit",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_the_search(stage: Stage, stream: bool) -> None:
    waiting = stage.spawn(stage.chat(use_beam_search=True, n=2, stream=stream))
    submit = await stage.engine.accept_search()
    waiting.cancel()
    abort = await stage.engine.read_abort()
    assert (abort.request_id, abort.attachment) == (submit.request_id, submit.attachment)
    assert "disconnect" in abort.reason
    await stage.until(lambda: stage.model.engine.num_open == 0)
