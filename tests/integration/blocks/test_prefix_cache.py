"""A beginning that was computed once is not computed again, and the tokens are the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from tests.integration.configurations import Configuration, serve
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

BLOCK_SIZE = 16
CACHING = Configuration(BLOCK_SIZE)
WITHOUT = Configuration(BLOCK_SIZE, prefix_caching=False)


def pair(second_salt: str = "") -> tuple[Submit, Submit]:
    """Two requests whose first 100 tokens are equal."""
    rng = np.random.default_rng(5)
    common = rng.integers(3, VOCAB_SIZE, 100).tolist()
    first = submit("first", common + rng.integers(3, VOCAB_SIZE, 9).tolist())
    tail = rng.integers(3, VOCAB_SIZE, 23).tolist()
    second = submit("second", common + tail, cache_salt=second_salt, temperature=0.9, seed=4)
    return first, second


@pytest.mark.parametrize("kv_memory", ["paged", "virtual"])
@pytest.mark.parametrize("together", [True, False])
async def test_a_common_prefix_is_computed_once(
    together: bool, kv_memory: str, llama: Path, redis_bus: RedisBus
) -> None:
    first, second = pair()
    expected = await serve(redis_bus, llama, WITHOUT, [first], [second])
    assert [answer.num_cached for answer in expected.answers] == [[0], [0]]
    rounds = [[first, second]] if together else [[first], [second]]
    found = await serve(redis_bus, llama, replace(CACHING, kv_memory=kv_memory), *rounds)
    assert [answer.num_cached for answer in found.answers] == [
        [0],
        [100 // BLOCK_SIZE * BLOCK_SIZE],
    ]
    assert found.outputs() == expected.outputs()


async def test_another_salt_finds_nothing(llama: Path, redis_bus: RedisBus) -> None:
    first, second = pair(second_salt="somebody else")
    found = await serve(redis_bus, llama, CACHING, [first], [second])
    assert [answer.num_cached for answer in found.answers] == [[0], [0]]


async def test_a_repeated_request_computes_at_least_one_token(
    llama: Path, redis_bus: RedisBus
) -> None:
    prompt = np.random.default_rng(6).integers(3, VOCAB_SIZE, 4 * BLOCK_SIZE).tolist()
    rounds = [[submit(f"r{index}", prompt, max_tokens=40)] for index in range(2)]
    found = await serve(redis_bus, llama, CACHING, *rounds)
    assert [answer.num_cached for answer in found.answers] == [[0], [3 * BLOCK_SIZE]]
    assert found.outputs()[0] == found.outputs()[1]


async def test_generated_tokens_are_found_too(llama: Path, redis_bus: RedisBus) -> None:
    prompt = np.random.default_rng(7).integers(3, VOCAB_SIZE, 20).tolist()
    opening = submit("opening", prompt, max_tokens=45, ignore_eos=True)
    (answer,) = (await serve(redis_bus, llama, WITHOUT, [opening])).answers
    question = np.random.default_rng(8).integers(3, VOCAB_SIZE, 11).tolist()
    reply = submit("reply", prompt + answer.tokens + question)
    expected = await serve(redis_bus, llama, WITHOUT, [reply])
    found = await serve(redis_bus, llama, CACHING, [opening], [reply])
    # The last token generated was never computed.
    assert found.answers[1].num_cached == [(20 + 45 - 1) // BLOCK_SIZE * BLOCK_SIZE]
    assert found.answers[1].outputs == expected.answers[0].outputs
