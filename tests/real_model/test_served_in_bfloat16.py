"""Served in bfloat16, a real model is as close to float32 as transformers in bfloat16 is."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.deploy.running import Running
from tests.real_model.alone import Alone
from tests.real_model.test_served import LICENSE, NUM_TOKENS, complete, places, prompts

# The error of transformers in bfloat16 may be exceeded by this factor.
FACTOR = 1.25
# Rounding decides between tokens whose log-probabilities differ by less. Of the prompts below,
# transformers in bfloat16 continues a third otherwise than in float32, and up to 0.1 worse.
ROUNDING = 0.25


def test_a_texts_log_probabilities_are_as_exact_as_those_of_transformers(
    served_in_bfloat16: Running, alone: Alone
) -> None:
    tokens = alone.encode(LICENSE)[:500]
    exact, theirs = (each.prompt_logprobs(tokens) for each in (alone, alone.in_bfloat16()))
    scored = complete(served_in_bfloat16, tokens, max_tokens=1, prompt_logprobs=0)
    ours = places(scored["prompt_logprobs"], tokens)
    errors = [float((found - exact).pow(2).mean().sqrt()) for found in (ours, theirs)]
    assert errors[0] < FACTOR * errors[1]
    perplexities = [math.exp(-float(found.double().mean())) for found in (ours, exact)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.02)


def test_thirty_prompts_at_once_are_continued_by_tokens_that_are_likeliest_up_to_rounding(
    served_in_bfloat16: Running, alone: Alone
) -> None:
    asked = prompts(alone)
    continued = partial(complete, served_in_bfloat16, max_tokens=NUM_TOKENS)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(continued, asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert alone.shortfall(prompt, answer["token_ids"]) < ROUNDING
