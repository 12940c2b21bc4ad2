"""Several choices of one request: each draws as it would have drawn alone."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Stop, Submit
from tests.integration.configurations import Configuration, serve
from tests.support.engine import DEADLINE_S, running_engine
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

NUM_CHOICES = 4
NUM_TOKENS = 20
LENGTHS = (1, 15, 16, 17, 33, 47)  # around the borders of blocks
ROOMY = Configuration()
SMALL_POOL = 240  # tokens: each request fits in, all of them do not

Outputs = list[dict[int, list[int]]]
_alone: dict[int, Outputs] = {}


def asked(index: int, num_choices: int = NUM_CHOICES, max_tokens: int = NUM_TOKENS) -> Submit:
    """A seeded request; its prompt does not depend on how many choices it has."""
    prompt = np.random.default_rng(index).integers(3, VOCAB_SIZE, LENGTHS[index])
    return submit(
        f"r{index}-{num_choices}",
        prompt.tolist(),
        num_choices=num_choices,
        max_tokens=max_tokens,
        temperature=0.9,
        top_p=0.95,
        seed=100 + index,
        ignore_eos=True,
    )


async def outputs_alone(bus: RedisBus, model: Path, num_choices: int) -> Outputs:
    """One request after the other, each with the engine for itself; computed once."""
    if num_choices not in _alone:
        requests = ([asked(index, num_choices)] for index in range(len(LENGTHS)))
        _alone[num_choices] = (await serve(bus, model, ROOMY, *requests)).outputs()
    return _alone[num_choices]


async def test_the_first_choice_is_the_request_with_one(llama: Path, redis_bus: RedisBus) -> None:
    several = await outputs_alone(redis_bus, llama, NUM_CHOICES)
    single = await outputs_alone(redis_bus, llama, 1)
    assert [{0: outputs[0]} for outputs in several] == single
    for outputs in several:
        assert len({tuple(tokens) for tokens in outputs.values()}) == NUM_CHOICES
        assert {len(tokens) for tokens in outputs.values()} == {NUM_TOKENS}


@pytest.mark.parametrize("pool_tokens", [16_384, SMALL_POOL])
@pytest.mark.parametrize(
    ("block_size", "kv_memory"), [(1, "paged"), (4, "paged"), (16, "paged"), (8, "virtual")]
)
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_neither_neighbours_nor_preemption_change_a_choice(
    prefix_caching: bool,
    block_size: int,
    kv_memory: str,
    pool_tokens: int,
    llama: Path,
    redis_bus: RedisBus,
) -> None:
    expected = await outputs_alone(redis_bus, llama, NUM_CHOICES)
    configuration = Configuration(
        block_size, pool_tokens, prefix_caching, max_num_batched_tokens=32, kv_memory=kv_memory
    )
    everything = [asked(index) for index in range(len(LENGTHS))]
    served = await serve(redis_bus, llama, configuration, everything)
    assert served.outputs() == expected
    assert (served.num_preemptions > 0) == (pool_tokens == SMALL_POOL)


async def test_a_choice_that_is_stopped_leaves_the_others_alone(
    llama: Path, redis_bus: RedisBus
) -> None:
    expected = (await outputs_alone(redis_bus, llama, NUM_CHOICES))[2]
    request = asked(2, max_tokens=300)
    async with running_engine(redis_bus, ROOMY.worker(llama), ROOMY.scheduler()) as engine:
        generating = asyncio.create_task(engine.generate([request]))
        async with asyncio.timeout(DEADLINE_S):
            while engine.num_results < 5:
                await asyncio.sleep(0)
        await engine.send(Stop(request.request_id, 1, 3))
        (answer,) = await generating
        await engine.until_idle()
    assert answer.finish_reasons == {0: "length", 1: "stop", 2: "length", 3: "length"}
    for choice, tokens in answer.outputs.items():
        assert tokens[:NUM_TOKENS] == expected[choice][: len(tokens)]
        assert (len(tokens) < 300) == (choice == 1)
