"""A task that is cancelled ends, also between two replies of Redis."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from shared.bus.api import START, Append
from shared.bus.redis_bus import RedisBus

_NUM_CLIENTS = 60


async def _ask_for_ever(ask: Callable[[], Awaitable[object]]) -> None:
    while True:
        await ask()


async def _num_left_after_one_cancel(url: str, seed: int) -> int:
    """Clients that go on though each was cancelled, at a moment of its own."""
    rng = random.Random(seed)
    bus = RedisBus(url)
    asks: list[Callable[[], Awaitable[object]]] = [
        bus.run_id,
        bus.now_ms,
        lambda: bus.get("key"),
        lambda: bus.last_id("log"),
        lambda: bus.append(Append("log", [b"x"])),
        lambda: bus.read({"log": START}, 0, 1),
    ]
    clients = [
        asyncio.create_task(_ask_for_ever(asks[index % len(asks)])) for index in range(_NUM_CLIENTS)
    ]
    for client in clients:
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        client.cancel()
    _, left = await asyncio.wait(clients, timeout=2)
    num_left = len(left)
    while left:  # leave nothing behind, even if a cancellation is lost
        for client in left:
            client.cancel()
        _, left_now = await asyncio.wait(left, timeout=0.1)
        if not left_now:
            break
        left = left_now
    await bus.close()
    return num_left


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_clients_that_are_cancelled_at_random_moments_all_end(
    redis_url: str, run: Callable[..., int]
) -> None:
    assert [run(_num_left_after_one_cancel(redis_url, seed)) for seed in (1, 2)] == [0, 0]
