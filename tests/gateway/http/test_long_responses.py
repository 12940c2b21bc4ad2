"""Answers of any length leave the event loop and other threads time."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.events import TokensArrived
from gateway.http.long_responses import dumped
from gateway.prompts.prompt import Prompt
from shared.messages.endings import EndFlag
from tests.gateway.conftest import Stage
from tests.gateway.fake_engine import scores
from tests.gateway.generations import generation_of
from tests.gateway.stream_contexts import display

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(-0.5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_pieces_make_the_text_that_json_makes(answer: dict[str, Any]) -> None:
    assert dumped(answer).decode() == json.dumps(answer)


@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_long_lists_make_the_text_that_json_makes(length: int) -> None:
    places = [{"a": {"logprob": -number / 3}} for number in range(length)]
    choice = {"index": 0, "logprobs": {"top_logprobs": places, "tokens": ["é"] * length}}
    answer = {"id": "x", "choices": [choice] * 3, "prompt_token_ids": [1] * length, "usage": {}}
    assert dumped(answer).decode() == json.dumps(answer)


async def test_a_backlog_of_tokens_lets_others_run_before_it_is_taken(stage: Stage) -> None:
    num_tokens = 5_000
    shown = display()
    generation = generation_of(stage.server.service.models, [Prompt([5], None, "prompt")], shown)
    # Those with log-probabilities wait apart.
    for token in range(num_tokens):
        known = scores(50, -1.0, {50: -1.0})
        generation.queue.put(TokensArrived(shown.call_id, 0, [50 + token % 9], (known,)))
    loop, turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        again.append(loop.call_soon(turn))

    again = [loop.call_soon(turn)]
    taken, deltas = 0, generation.deltas()
    while taken < num_tokens:
        taken += sum(len(delta.token_ids) for _, delta in await anext(deltas))
    again[-1].cancel()
    assert turns >= 10


@pytest.mark.parametrize(("num_tokens", "elsewhere"), [(3, False), (150, True)])
async def test_log_probabilities_of_many_tokens_are_written_on_another_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, num_tokens: int, elsewhere: bool
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        "gateway.openai.responses.serializer.Frame.whole",
        lambda _frame, fields: threads.append(threading.current_thread()) or dumped(fields),
    )
    waiting = stage.spawn(stage.complete(n=2, max_tokens=num_tokens, logprobs=1))
    submit = await stage.engine.accept_next()
    rows = [(submit.request_id, choice) for choice in range(2)]
    known = {row: scores(50, -1.0, {50: -1.0}) for row in rows}
    for step in range(num_tokens):
        ended = dict.fromkeys(rows, EndFlag.LENGTH) if step == num_tokens - 1 else {}
        await stage.engine.step(dict.fromkeys(rows, 50), ended, known)
    answer = (await waiting).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [num_tokens] * 2
    assert [thread is not threading.current_thread() for thread in threads] == [elsewhere]
