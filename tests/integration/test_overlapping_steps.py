"""Steps that begin before the one before has ended: nothing of it shows in a token."""

from pathlib import Path

import numpy as np
import pytest

from shared.bus.redis_bus import RedisBus
from shared.messages.requests import Submit
from tests.integration.configurations import Configuration, serve
from tests.support.engine import Engine, running_scheduler, running_worker
from tests.support.models import VOCAB_SIZE
from tests.support.requests import submit

NUM_REQUESTS = 12
CONFIGURATIONS = [
    Configuration(16),
    Configuration(4, pool_tokens=320, max_num_batched_tokens=12),
    Configuration(4, pool_tokens=320, max_plans_in_flight=4, preemption="swap", host_tokens=320),
    Configuration(16, pool_tokens=320, prefix_caching=False, kv_memory="virtual"),
]


def requests() -> list[Submit]:
    """Greedy and drawn ones; some end by one of many stop tokens, others at their length."""
    rng = np.random.default_rng(4)
    common = rng.integers(3, VOCAB_SIZE, 70).tolist()
    return [
        submit(
            f"r{index}",
            common[: 10 * (index % 6)] + rng.integers(3, VOCAB_SIZE, 1 + 5 * index).tolist(),
            num_choices=1 + (index % 4 == 3),
            max_tokens=30,
            temperature=0.8 * (index % 3 > 0),
            seed=index,
            ignore_eos=True,
            stop_token_ids=tuple(range(3, VOCAB_SIZE, 30)),
        )
        for index in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=repr)
async def test_tokens_are_those_of_steps_that_follow_each_other(
    configuration: Configuration, llama: Path, redis_bus: RedisBus
) -> None:
    expected = (await serve(redis_bus, llama, Configuration(), requests())).answers
    scheduler = configuration.scheduler()
    async with (
        running_worker(
            redis_bus, configuration.worker(llama), scheduler.engine_id, overlap=True
        ) as device,
        running_scheduler(redis_bus, scheduler) as metrics,
    ):
        engine = Engine(redis_bus, scheduler.engine_id, metrics)
        answers = await engine.generate(requests())
        await engine.until_idle()
    assert [answer.outputs for answer in answers] == [answer.outputs for answer in expected]
    ends = [answer.finish_reasons for answer in answers]
    assert ends == [answer.finish_reasons for answer in expected]
    assert {reason for reasons in ends for reason in reasons.values()} == {"stop", "length"}
    assert device.num_overlapping > 10
