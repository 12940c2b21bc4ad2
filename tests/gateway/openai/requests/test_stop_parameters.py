"""Stop strings, stop tokens and the ends of texts over HTTP."""

import json

import pytest

from gateway.engine.event_queue import ClientDisconnected
from gateway.engine.events import TokensArrived
from gateway.openai.generation.generation import ClientLeft
from gateway.prompts.prompt import Prompt
from shared.messages.endings import EndFlag
from shared.messages.requests import Stop
from tests.gateway.conftest import Stage, events
from tests.gateway.generations import generation_of
from tests.gateway.stream_contexts import display


def letters(stage: Stage, text: str) -> list[int]:
    """One token for each character."""
    return [
        token for char in text for token in stage.tokenizer.encode(char, add_special_tokens=False)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_cuts_the_text_and_sends_a_stop(
    stage: Stage, stream: bool
) -> None:
    waiting = stage.spawn(stage.complete(stop=["END", "zzz"], stream=stream, max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, letters(stage, "textENENDmore"), flag=None)
    stop = await stage.engine.read_stop()
    assert stop == Stop(submit.request_id, 0, 9)
    response = await waiting
    if stream:
        chunks = [json.loads(event)["choices"][0] for event in events(response.text)[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == "textEN"
        assert [chunk["finish_reason"] for chunk in chunks][-1] == "stop"
    else:
        [choice] = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("textEN", "stop")
        assert response.json()["usage"]["completion_tokens"] == 9
    assert stage.model.engine.num_open == 0


async def test_what_could_begin_a_stop_string_is_shown_at_the_end(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(stop="END", max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, letters(stage, "the EN"))
    [choice] = (await waiting).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the EN", "length")


async def test_a_stop_string_in_the_last_token_is_a_stop_and_not_a_length(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(stop="END", max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, letters(stage, "the END"))
    [choice] = (await waiting).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the ", "stop")
    stage.answer_text("Hi")
    await stage.complete()
    # The engine had ended it already, and needs no Stop.
    assert not any(isinstance(message, Stop) for message in stage.engine.received)


async def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(stop="ab", min_tokens=3, max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, letters(stage, "abcabd"), flag=None)
    await stage.engine.read_stop()
    assert (await waiting).json()["choices"][0]["text"] == "abc"


async def test_a_stopped_choice_does_not_end_the_others(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(prompt=["A", "B"], stop="X", max_tokens=50))
    submits = [await stage.engine.read_submit() for _ in range(2)]
    for submit in submits:
        await stage.engine.accept(submit)
    await stage.engine.generate(submits[0], letters(stage, "onX"), flag=None)
    await stage.engine.read_stop()
    await stage.engine.generate(submits[1], letters(stage, "two"))
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["on", "two"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]


async def test_special_tokens_make_no_text_but_count(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, [*letters(stage, "ab"), 1], EndFlag.STOP)
    body = (await waiting).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


async def test_half_a_character_is_never_streamed(stage: Stage) -> None:
    tokens = stage.tokenizer.encode("a😀b", add_special_tokens=False)
    response = stage.spawn(stage.complete(stream=True, max_tokens=50))
    submit = await stage.engine.accept_next()
    await stage.engine.generate(submit, tokens)
    texts = [
        json.loads(event)["choices"][0]["text"] for event in events((await response).text)[:-1]
    ]
    assert "".join(texts) == "a😀b"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


async def test_a_text_that_ends_in_half_a_character_ends_with_a_replacement(stage: Stage) -> None:
    waiting = stage.spawn(stage.complete(max_tokens=50))
    submit = await stage.engine.accept_next()
    tokens = stage.tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    await stage.engine.generate(submit, tokens)
    text = (await waiting).json()["choices"][0]["text"]
    assert text == stage.tokenizer.decode(tokens)
    assert text.endswith("\N{REPLACEMENT CHARACTER}")


async def test_a_client_that_leaves_with_the_stop_string_leaves_nothing_running(
    stage: Stage,
) -> None:
    prompt = Prompt([5], None, "prompt")
    generation = generation_of(stage.server.service.models, [prompt], display(stops=("END",)))
    await generation.submit()
    generation.queue.put(TokensArrived(display().call_id, 0, letters(stage, "END"), ()))
    generation.queue.put(ClientDisconnected())
    with pytest.raises(ClientLeft):
        await anext(generation.deltas())
    generation.close()
    await stage.engine.read_submit()
    assert (await stage.engine.read_abort()).request_id == display().call_id


def test_all_choices_of_a_call_share_one_automaton_of_its_stop_strings(stage: Stage) -> None:
    prompts = [Prompt([2], "a", "prompt")] * 2
    shown = display(stops=("END", "zzz"), num_choices=3, num_candidates=3, num_prompts=2)
    generation = generation_of(stage.server.service.models, prompts, shown)
    finders = [choice.text._stops for choice in generation.output.choices]
    assert len(finders) == len(set(map(id, finders))) == 6
    assert len({id(finder._stops) for finder in finders}) == 1
