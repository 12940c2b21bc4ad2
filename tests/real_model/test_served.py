"""A real, trained model served by real processes answers as it does in transformers."""

import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from openai import OpenAI

from deploy.settings import REPOSITORY
from tests.deploy.running import Running, forked_by
from tests.real_model.alone import Alone, Tokens
from tests.real_model.conftest import BLOCK_SIZE, NAME
from tests.real_model.long_text import EVERY, NUM_OUTPUT, expected, long_prompt

LICENSE = (REPOSITORY / "LICENSE").read_text()
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Which planet is the largest of the solar system?",
    "What is the opposite of hot?",
    "How many days has a week?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Translate 'good morning' into French.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Explain recursion in one sentence.",
    "Give me a recipe for pancakes.",
    "Is water wet?",
    "Write a Python function that reverses a string.",
]
# Sums of products in another order differ by about 1e-5 of a log-probability.
CLOSE = 1e-3
NUM_TOKENS = 16
DEADLINE_S = 900.0  # of one answer, on a machine with much else to do


def prompts(alone: Alone) -> list[Tokens]:
    """Thirty: questions, and beginnings of a text with lengths around the borders of blocks."""
    text = alone.encode(LICENSE)
    lengths = [BLOCK_SIZE * blocks + more for blocks in (1, 2, 4, 8, 16) for more in (-1, 0, 1)]
    return [alone.chat(question) for question in QUESTIONS] + [
        text[40 * i : 40 * i + length] for i, length in enumerate(lengths)
    ]


def ask(client: OpenAI, question: str, **more: Any) -> str:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **{"max_tokens": 60, **more},
    )
    return answer.choices[0].message.content or ""


def complete(served: Running, prompt: Tokens, **more: Any) -> dict[str, Any]:
    """The only choice of a greedy completion, with token ids and usage."""
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
    status, answer = served.post("/v1/completions", body, timeout_s=DEADLINE_S)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice | {"usage": answer["usage"]}


def places(scores: list[dict[str, dict[str, float]] | None], tokens: Tokens) -> torch.Tensor:
    """Log-probability of each token of a prompt but the first, from ``prompt_logprobs``."""
    assert scores[0] is None
    assert len(scores) == len(tokens)
    found = [
        place[str(token)]["logprob"]
        for place, token in zip(scores[1:], tokens[1:], strict=True)
        if place is not None
    ]
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("Which planet is the largest of the solar system?", "Jupiter"),
        ("How many days has a week?", "7"),
    ],
)
def test_questions_are_answered(client: OpenAI, question: str, word: str) -> None:
    assert word in ask(client, question)


def test_a_stream_has_the_text_of_the_whole_answer_and_ends_by_itself(client: OpenAI) -> None:
    question = "What is the capital of France?"
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == ask(client, question)
    assert choices[-1].finish_reason == "stop"


def test_thirty_prompts_at_once_are_continued_as_transformers_continues_them(
    served: Running, alone: Alone
) -> None:
    asked = prompts(alone)
    assert len(asked) == 30
    continued = partial(complete, served, max_tokens=NUM_TOKENS)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(continued, asked))
    for prompt, answer in zip(asked, answers, strict=True):
        output = answer["token_ids"]
        assert answer["finish_reason"] == ("stop" if len(output) < NUM_TOKENS else "length")
        assert alone.shortfall(prompt, output) < CLOSE, alone.tokenizer.decode(prompt)


def test_a_texts_perplexity_is_that_of_transformers(
    served: Running, client: OpenAI, alone: Alone
) -> None:
    tokens = alone.encode(LICENSE)[:500]
    theirs = alone.prompt_logprobs(tokens)
    scored = complete(served, tokens, max_tokens=1, prompt_logprobs=0)
    ours = places(scored["prompt_logprobs"], tokens)
    assert float((ours - theirs).abs().max()) < CLOSE
    perplexities = [math.exp(-float(found.double().mean())) for found in (ours, theirs)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)
    assert perplexities[0] < 20, "the model reads English"

    echoed = client.completions.create(
        model=NAME, prompt=tokens, echo=True, logprobs=0, max_tokens=1, temperature=0
    )
    scores = echoed.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[1 : len(tokens)] == pytest.approx(ours.tolist(), abs=CLOSE)


def test_a_worker_that_is_killed_in_mid_answer_changes_no_text(
    served: Running, client: OpenAI
) -> None:
    question = "Tell me a long story about a fox and a crow."
    undisturbed = ask(client, question, max_tokens=80)
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=80,
        stream=True,
    )
    text = ""
    killed = False
    for number, chunk in enumerate(stream):
        text += chunk.choices[0].delta.content or ""
        if number == 20:
            worker = forked_by(served.pid("worker"))
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            killed = True
    assert killed
    assert text == undisturbed


def test_cached_prefixes_change_no_token(served: Running, alone: Alone) -> None:
    prompt = alone.encode(LICENSE)[100 : 100 + 40 * BLOCK_SIZE + 3]
    salted = {"max_tokens": 16, "logprobs": 0}
    computed = complete(served, prompt, cache_salt="first", **salted)
    reused = complete(served, prompt, cache_salt="first", **salted)
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (computed, reused)
    ]
    assert cached == [0, 40 * BLOCK_SIZE]
    assert reused["token_ids"] == computed["token_ids"]
    assert reused["logprobs"]["token_logprobs"] == pytest.approx(
        computed["logprobs"]["token_logprobs"], abs=CLOSE
    )


def test_a_prompt_that_fills_the_context_is_read_as_transformers_reads_it(
    served: Running, alone: Alone
) -> None:
    prompt = long_prompt(alone)
    theirs = expected()
    answer = complete(served, prompt, max_tokens=NUM_OUTPUT, prompt_logprobs=0)
    ours = places(answer["prompt_logprobs"], prompt)
    assert ours[::EVERY].tolist() == pytest.approx(theirs.logprobs, abs=CLOSE)
    assert float(ours.double().mean()) == pytest.approx(theirs.mean_logprob, abs=1e-4)
    assert answer["token_ids"] == theirs.output
