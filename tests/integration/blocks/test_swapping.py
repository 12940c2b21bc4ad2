"""Blocks that wait in the host pool: what comes back is what went, and nothing of it shows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from tests.integration.configurations import Configuration, serve
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

LENGTHS = (1, 15, 16, 17, 33, 47, 5, 30)  # around the borders of blocks
NUM_TOKENS = 24
ROOMY = Configuration(prefix_caching=False)
SMALL_POOL = 240  # tokens: each request fits in, all of them do not

Outputs = list[dict[int, list[int]]]
_alone: dict[int, Outputs] = {}


def requests(num_choices: int) -> list[Submit]:
    """Greedy and seeded ones in turn."""
    rng = np.random.default_rng(17)
    return [
        submit(
            f"r{index}",
            rng.integers(3, VOCAB_SIZE, length).tolist(),
            num_choices=num_choices,
            max_tokens=NUM_TOKENS,
            temperature=0.9 * (index % 2),
            top_p=0.95,
            seed=index,
            ignore_eos=True,
        )
        for index, length in enumerate(LENGTHS)
    ]


async def outputs_alone(bus: RedisBus, model: Path, num_choices: int) -> Outputs:
    """Each request alone on the engine, without preemption; computed once."""
    if num_choices not in _alone:
        served = await serve(bus, model, ROOMY, *([one] for one in requests(num_choices)))
        assert served.num_preemptions == 0
        _alone[num_choices] = served.outputs()
    return _alone[num_choices]


def crowded(block_size: int = 4, prefix_caching: bool = True) -> Configuration:
    """A pool that is too small for all, and a host pool with room for what is preempted."""
    return Configuration(
        block_size,
        SMALL_POOL,
        prefix_caching,
        max_num_batched_tokens=48,
        preemption="swap",
        host_tokens=4 * SMALL_POOL,
    )


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_swapped_requests_go_on_as_if_nothing_had_happened(
    prefix_caching: bool, block_size: int, num_choices: int, llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama, num_choices)
    configuration = crowded(block_size, prefix_caching)
    served = await serve(redis_bus, llama, configuration, requests(num_choices))
    assert served.outputs() == expected
    assert served.num_swapped > 0


@pytest.mark.parametrize(("prefix_caching", "block_size"), [(True, 8), (False, 16)])
async def test_swapped_requests_go_on_in_virtual_memory(
    prefix_caching: bool, block_size: int, llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama, 3)
    configuration = replace(crowded(block_size, prefix_caching), kv_memory="virtual")
    served = await serve(redis_bus, llama, configuration, requests(3))
    assert served.outputs() == expected
    assert served.num_swapped > 0


@pytest.mark.parametrize("max_plans_in_flight", [1, 4])
async def test_plans_in_flight_do_not_disturb_swapping(
    max_plans_in_flight: int, llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama, 3)
    configuration = replace(crowded(), max_plans_in_flight=max_plans_in_flight)
    served = await serve(redis_bus, llama, configuration, requests(3))
    assert served.outputs() == expected
    assert served.num_swapped > 0


@pytest.mark.parametrize("host_tokens", [0, 8])
async def test_groups_that_do_not_fit_into_the_host_pool_are_recomputed(
    host_tokens: int, llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama, 3)
    configuration = replace(crowded(), host_tokens=host_tokens)
    served = await serve(redis_bus, llama, configuration, requests(3))
    assert served.outputs() == expected
    assert served.num_recomputed > 0
    assert host_tokens or not served.num_swapped


async def test_a_host_pool_with_room_for_some_serves_those(
    llama: Path, redis_bus: RedisBus
) -> None:
    expected = await outputs_alone(redis_bus, llama, 3)
    configuration = replace(crowded(), host_tokens=80)
    served = await serve(redis_bus, llama, configuration, requests(3))
    assert served.outputs() == expected
    assert served.num_recomputed > 0
    assert served.num_swapped > 0


async def test_the_cheaper_way_is_as_good(llama: Path, redis_bus: RedisBus) -> None:
    expected = await outputs_alone(redis_bus, llama, 3)
    served = await serve(redis_bus, llama, replace(crowded(), preemption="auto"), requests(3))
    assert served.outputs() == expected
    assert served.num_preemptions > 0
