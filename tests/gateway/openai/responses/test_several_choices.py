"""n and best_of: several continuations of one prompt, each with an end of its own."""

import json
from typing import Any

import pytest

from shared.messages.endings import EndFlag
from shared.messages.requests import Stop, Submit
from tests.gateway.conftest import Stage, events
from tests.gateway.fake_engine import scores


def tokens_of(stage: Stage, text: str) -> list[int]:
    return stage.tokenizer.encode(text, add_special_tokens=False)


def letters(stage: Stage, text: str) -> list[int]:
    """One token for each character."""
    return [token for char in text for token in tokens_of(stage, char)]


def texts_by_index(response_text: str) -> dict[int, str]:
    """The text of each choice of a streamed completion."""
    texts: dict[int, str] = {}
    for event in events(response_text)[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def play_all(stage: Stage, submit: Submit, *texts: str) -> None:
    """One text for each choice."""
    choices = {number: tokens_of(stage, text) for number, text in enumerate(texts)}
    await stage.engine.generate_all(submit, choices)


# ------------------------------------------------------------------------- n


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_one_request_with_one_seed(stage: Stage, stream: bool) -> None:
    waiting = stage.spawn(stage.complete(n=3, max_tokens=50, stream=stream))
    submit = await stage.engine.accept_next()
    assert submit.num_choices == 3
    await play_all(stage, submit, "One", "Two and more", "Three")
    response = await waiting
    if stream:
        texts = texts_by_index(response.text)
    else:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
    assert texts == {0: "One", 1: "Two and more", 2: "Three"}
    assert len(stage.engine.received) == 1
    assert stage.model.engine.num_open == 0


async def test_the_prompt_is_counted_once_and_the_output_of_all_choices(stage: Stage) -> None:
    stage.answer(lambda _: [50, 51])
    answer = await stage.openai.completions.create(model="demo", prompt=[5, 6, 7], n=4)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    answer = await stage.openai.completions.create(model="demo", prompt=[[5, 6, 7], [8]], n=2)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_choice_j_of_prompt_i_has_the_index_i_n_plus_j(stage: Stage, stream: bool) -> None:
    body = {"prompt": [[5], [6, 7]], "n": 2, "stream": stream, "return_token_ids": True}
    waiting = stage.spawn(stage.complete(**body, max_tokens=50))
    submits = [await stage.engine.read_submit() for _ in range(2)]
    assert [submit.num_choices for submit in submits] == [2, 2]
    for submit in submits:
        await stage.engine.accept(submit)
    await play_all(stage, submits[1], "c", "d")
    await play_all(stage, submits[0], "a", "b")
    response = await waiting
    if stream:
        assert texts_by_index(response.text) == dict(enumerate("abcd"))
        chunks = [json.loads(event)["choices"][0] for event in events(response.text)[:-1]]
        choices = sorted(
            (chunk for chunk in chunks if "prompt_token_ids" in chunk), key=lambda c: c["index"]
        )
    else:
        choices = response.json()["choices"]
        assert [choice["text"] for choice in choices] == list("abcd")
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5], [5], [6, 7], [6, 7]]


async def test_a_whole_chat_has_n_choices(stage: Stage) -> None:
    waiting = stage.spawn(stage.chat(n=2, max_tokens=50))
    await play_all(stage, await stage.engine.accept_next(), "Yes", "No, never")
    choices = (await waiting).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["message"]["content"] for choice in choices] == ["Yes", "No, never"]


async def test_a_streamed_chat_begins_and_ends_each_choice(stage: Stage) -> None:
    opening = stage.spawn(
        stage.openai.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            n=2,
            stream=True,
            max_tokens=50,
            extra_body={"return_token_ids": True},
        )
    )
    await play_all(stage, await stage.engine.accept_next(), "Yes", "No, never")
    stream = await opening
    roles, texts, ends, prompts = [], {0: "", 1: ""}, [], 0
    async for chunk in stream:
        prompts += "prompt_token_ids" in (chunk.model_extra or {})
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append((choice.index, choice.delta.role))
        if choice.finish_reason:
            ends.append((choice.index, choice.finish_reason))
    assert roles == [(0, "assistant"), (1, "assistant")]
    assert texts == {0: "Yes", 1: "No, never"}
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert prompts == 1


async def test_greedy_choices_may_be_equal(stage: Stage) -> None:
    stage.answer_text("Same")
    answer = (await stage.complete(n=3, temperature=0)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Same"] * 3


async def test_echo_stands_before_every_choice(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(n=2, echo=True, max_tokens=50))
    await play_all(stage, await stage.engine.accept_next(), " you", " me")
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hello you", "Hello me"]


async def test_echoed_scores_stand_in_every_choice(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=[5, 6], n=2, echo=True, logprobs=0))
    submit = await stage.engine.accept_next()
    name = submit.request_id
    found = {(name, number): scores(50, -0.5, {}) for number in range(2)}
    await stage.engine.step(
        {(name, 0): 50, (name, 1): 50},
        {(name, 0): EndFlag.LENGTH, (name, 1): EndFlag.LENGTH},
        found,
        {name: [scores(6, -2.0, {}, 1)]},
    )
    found = [choice["logprobs"] for choice in (await waiting).json()["choices"]]
    assert [each["token_logprobs"] for each in found] == [[None, -2.0, -0.5]] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_own_choice_alone(stage: Stage, stream: bool) -> None:
    engine = stage.engine
    waiting = stage.spawn(stage.complete(n=3, stop="END", max_tokens=50, stream=stream))
    submit = await engine.accept_next()
    name = submit.request_id
    chars = {0: letters(stage, "first"), 1: letters(stage, "twEND"), 2: letters(stage, "third")}
    await engine.generate_all(submit, chars, flag=None)
    assert await engine.read_stop() == Stop(name, 1, 5)
    # A step that was already under way, and what the scheduler says of the Stop.
    await engine.step({(name, number): 60 for number in range(3)})
    await engine.end_choice(submit, 1, "stop")
    await engine.end_choice(submit, 1, "stop")
    await engine.step({(name, 0): 61, (name, 2): 61}, {(name, 2): EndFlag.STOP})
    await engine.step({(name, 0): 62}, {(name, 0): EndFlag.LENGTH})
    response = await waiting
    tail = stage.tokenizer.decode([60, 61])
    expected = {0: "first" + tail + stage.tokenizer.decode([62]), 1: "tw", 2: "third" + tail}
    if stream:
        assert texts_by_index(response.text) == expected
    else:
        choices = response.json()["choices"]
        assert {choice["index"]: choice["text"] for choice in choices} == expected
        assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "stop"]
        assert response.json()["usage"]["completion_tokens"] == 8 + 5 + 7
    assert [type(message).__name__ for message in engine.received] == ["Submit", "Stop"]
    assert stage.model.engine.num_open == 0


async def test_a_choice_that_the_engine_ends_by_itself_finishes(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(n=2, max_tokens=50))
    submit = await stage.engine.accept_next()
    choices = {number: tokens_of(stage, "a") for number in range(2)}
    await stage.engine.generate_all(submit, choices, flag=None)
    await stage.engine.end_choice(submit, 0, "length")
    await stage.engine.end(submit, "stop")
    choices_shown = (await waiting).json()["choices"]
    assert [choice["finish_reason"] for choice in choices_shown] == ["length", "stop"]


async def test_a_client_that_leaves_aborts_the_request_once(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(n=3, stop="X", stream=True))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, letters(stage, "aX"), flag=None, choice=1)
    await stage.engine.read_stop()
    waiting.cancel()
    abort = await stage.engine.read_abort()
    assert abort.request_id == submit.request_id
    await stage.until(lambda: stage.model.engine.num_open == 0)
    stage.answer_text("Hi")
    await stage.complete()
    kinds = [type(message).__name__ for message in stage.engine.received]
    assert kinds == ["Submit", "Stop", "Abort", "Submit"]


async def test_choices_survive_a_new_epoch_each_where_it_stood(stage: Stage) -> None:
    engine = stage.engine
    waiting = stage.spawn(stage.complete(n=3, stop="X", max_tokens=50))
    submit = await engine.accept_next()
    a, b, c = letters(stage, "abc"), letters(stage, "dX"), letters(stage, "e")
    await engine.generate_all(submit, {0: a, 1: b}, flag=None)
    await engine.generate(submit, c, choice=2)
    await engine.read_stop()
    await engine.start_epoch()
    # The Stop was not read yet: the second choice goes on, under a handle that no delivery has.
    await engine.accept(submit, a, b, c, ended={2: "length"})
    await engine.generate_all(submit, {0: letters(stage, "f"), 1: letters(stage, "g")})
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abcf", "d", "e"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]


async def test_what_follows_a_stop_string_may_lack_its_scores(stage: Stage) -> None:
    engine = stage.engine
    waiting = stage.spawn(stage.complete(n=2, stop="X", logprobs=0))
    submit = await engine.accept_next()
    [a], [x] = letters(stage, "a"), letters(stage, "X")
    rows = {(submit.request_id, 0): a, (submit.request_id, 1): x}
    found = {row: scores(token, -0.5, {}) for row, token in rows.items()}
    await engine.step(rows, logprobs=found)
    await engine.read_stop()
    await engine.start_epoch()
    # States have no scores: of the running choice there is none to miss.
    await engine.accept(submit, [a], [x, x])
    await engine.step(rows, dict.fromkeys(rows, EndFlag.LENGTH), found)
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["aa", ""]


async def test_requests_are_measured_once_and_choices_by_their_ends(stage: Stage) -> None:
    stage.answer(lambda _: [50, 51])
    await stage.complete(n=3, prompt=[5, 6])
    text = (await stage.http.get("/metrics")).text

    def value(name: str) -> float:
        [line] = [line for line in text.splitlines() if line.partition("{")[0].endswith(name)]
        return float(line.rpartition(" ")[2])

    assert value("time_to_first_token_seconds_count") == 1
    assert value("e2e_request_latency_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 3
    assert value("request_prompt_tokens_sum") == 2
    assert value("request_generation_tokens_sum") == 6
    assert value("open_streams") == 0
    ended = [line for line in text.splitlines() if 'finished_reason="length"' in line]
    assert [line.rpartition(" ")[2] for line in ended if "_total{" in line] == ["3.0"]


# ------------------------------------------------------------------- best_of


async def play_scored(stage: Stage, submit: Submit, *logprobs: list[float]) -> None:
    """One choice for each list, the tokens of choice ``j`` being ``100 + j``."""
    name = submit.request_id
    for position in range(max(len(some) for some in logprobs)):
        rows: dict[Any, Any] = {}
        ended: dict[Any, EndFlag] = {}
        for number, some in enumerate(logprobs):
            if position < len(some):
                rows[name, number] = scores(100 + number, some[position], {})
            if position == len(some) - 1:
                ended[name, number] = EndFlag.STOP
        tokens = {row: 100 + row[1] for row in rows}
        await stage.engine.step(tokens, ended, rows)


async def test_best_of_returns_the_likeliest_by_token(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=[5], n=2, best_of=4, return_token_ids=True))
    submit = await stage.engine.accept_next()
    assert submit.num_choices == 4
    assert submit.sampling.num_logprobs == 0
    # The sum would prefer the third, which is short.
    await play_scored(stage, submit, [-9.0], [-0.5] * 5, [-1.0], [-0.25] * 6)
    body = (await waiting).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in body["choices"]] == [[103] * 6, [101] * 5]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["prompt_tokens"] == 1
    assert body["usage"]["completion_tokens"] == 1 + 5 + 1 + 6


async def test_best_of_chooses_for_each_prompt_and_shows_scores_if_asked(stage: Stage) -> None:
    waiting = stage.spawn(
        stage.complete(prompt=[[5], [6]], best_of=2, logprobs=1, return_token_ids=True)
    )
    submits = [await stage.engine.read_submit() for _ in range(2)]
    assert {submit.sampling.num_logprobs for submit in submits} == {1}
    for submit, found in zip(submits, ([[-1.0], [-2.0]], [[-4.0], [-3.0]]), strict=True):
        await stage.engine.accept(submit)
        await play_scored(stage, submit, *found)
    choices = (await waiting).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[100], [101]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5], [6]]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-1.0], [-3.0]]


async def test_as_many_as_are_generated_need_no_ranking(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(n=2, best_of=2))
    submit = await stage.engine.accept_next()
    assert (submit.num_choices, submit.sampling.num_logprobs) == (2, None)
    await play_all(stage, submit, "a", "b")
    assert [choice["text"] for choice in (await waiting).json()["choices"]] == ["a", "b"]


async def test_equally_likely_ones_keep_their_order(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(n=2, best_of=3, return_token_ids=True))
    await play_scored(stage, await stage.engine.accept_next(), [-1.0], [-1.0, -1.0], [-1.0])
    choices = (await waiting).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[100], [101, 101]]


async def test_with_nothing_generated_there_is_nothing_to_rank(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(best_of=2, echo=True, max_tokens=0))
    await play_scored(stage, await stage.engine.accept_next(), [-2.0], [-1.0])
    [choice] = (await waiting).json()["choices"]
    assert choice["text"] == "Hello"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 2, "n": 2, "stream": True}, "stream"),
        ({"best_of": 2, "n": 3}, "3"),
        ({"best_of": 1, "n": 3}, "3"),
    ],
)
async def test_best_of_that_cannot_be_is_refused(
    stage: Stage, body: dict[str, Any], expected: str
) -> None:
    response = await stage.complete(**body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "best_of"
    assert "best_of" in error["message"]
    assert expected in error["message"]
    assert stage.engine.received == []
