"""Blocks, chunks, cached prefixes, plans in flight, preemption: nothing of it shows in a token."""

from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from shared.sampling import TokenBias
from tests.integration.configurations import Configuration, serve
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

NUM_TOKENS = 24
NUM_REQUESTS = 14
ONE_BY_ONE = Configuration(prefix_caching=False, max_plans_in_flight=1)
SMALL_POOL = 320  # tokens
PENALTIES = {
    "repetition_penalty": 1.05,
    "frequency_penalty": 1.5,
    "presence_penalty": -0.3,
    # Few enough tokens are left that they come again.
    "logit_bias": tuple(TokenBias(token, 20.0) for token in range(100, 115)),
}

CONFIGURATIONS = [
    Configuration(block_size, pool_tokens, prefix_caching, plans, max_num_batched_tokens)
    for block_size, (pool_tokens, prefix_caching, plans, max_num_batched_tokens) in zip(
        cycle((1, 4, 16)),
        product((16_384, SMALL_POOL), (True, False), (1, 2), (12, 512)),
        strict=False,
    )
]
VIRTUAL = [
    Configuration(8, SMALL_POOL, True, 2, 12, kv_memory="virtual"),
    Configuration(16, SMALL_POOL, False, 2, 512, kv_memory="virtual"),
]

_alone: dict[int, dict[int, list[int]]] = {}


def requests() -> list[Submit]:
    """Greedy and seeded ones, with and without a common beginning, some with two choices."""
    rng = np.random.default_rng(3)
    common = rng.integers(3, VOCAB_SIZE, 70).tolist()
    return [
        submit(
            f"r{index}",
            common[: 10 * (index % 8)] + rng.integers(3, VOCAB_SIZE, 1 + 5 * index).tolist(),
            num_choices=1 + (index % 4 == 3),
            max_tokens=NUM_TOKENS,
            temperature=0.8 * (index % 2),
            top_k=100 * (index % 3),
            seed=index,
            ignore_eos=True,
            **(PENALTIES if index % 3 == 2 else {}),
        )
        for index in range(NUM_REQUESTS)
    ]


async def outputs_alone(bus: RedisBus, model: Path) -> dict[int, dict[int, list[int]]]:
    """By request and choice; each request alone on the engine. Computed once."""
    if not _alone:
        served = await serve(bus, model, ONE_BY_ONE, *([one] for one in requests()))
        _alone.update(enumerate(served.outputs()))
    return _alone


@pytest.mark.parametrize("configuration", CONFIGURATIONS + VIRTUAL, ids=repr)
async def test_tokens_are_those_of_each_request_alone(
    configuration: Configuration, llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama)
    served = await serve(redis_bus, llama, configuration, requests())
    assert dict(enumerate(served.outputs())) == expected
    assert (served.num_preemptions > 0) == (configuration.pool_tokens == SMALL_POOL)
