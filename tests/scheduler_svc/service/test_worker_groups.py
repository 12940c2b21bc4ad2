"""The scheduler and engines of several workers: an epoch begins when all are of one group."""

from typing import Any

import pytest

from scheduler_svc.worker_watch import WorkerLook, look_at_workers
from shared.bus.api import Append
from shared.bus.memory import MemoryBus
from shared.codec import encode
from shared.messages.leases import PROTOCOL, EngineState
from shared.messages.outputs import StepResult
from shared.messages.plans import EpochStarted
from tests.scheduler_svc.service.peers import KEYS, Peer, Reader, ended, running, service, working
from tests.support.requests import submit


def ranks(bus: MemoryBus, num: int, **changes: Any) -> list[Peer]:
    """A peer for each rank; a change that is a list has an entry for each."""
    peers = []
    for rank in range(num):
        own = {
            key: value[rank] if isinstance(value, list) else value for key, value in changes.items()
        }
        values = {"instance": f"w{rank}", "rank": rank, "num_ranks": num, "group": "g", **own}
        peers.append(Peer(bus, **values))
    return peers


async def look(bus: MemoryBus, *peers: Peer, states: tuple[str, ...] = ()) -> WorkerLook:
    for peer, state in zip(peers, states or ["ready"] * len(peers), strict=True):
        await peer.announce(state, "no such folder" if state == "failed" else "")
    return await look_at_workers(bus, KEYS)


async def test_ready_ranks_of_one_group_have_what_the_least_of_them_has(bus: MemoryBus) -> None:
    peers = ranks(bus, 3, num_blocks=[32, 30, 31], prefill_tokens_per_s=[3e3, 2e3, 4e3], life="l")
    group = (await look(bus, *peers)).group
    assert group is not None
    assert group.instances == ("w0", "w1", "w2")
    assert group.kv.num_blocks == 30
    assert group.speeds is not None
    assert group.speeds.prefill_tokens_per_s == 2e3


@pytest.mark.parametrize(
    ("changes", "states", "state", "detail"),
    [
        ({}, ("ready", "loading"), "starting", "no worker of rank 1 is ready"),
        ({}, ("loading", "ready"), "starting", "no worker of rank 0 is ready"),
        ({}, ("loading", "failed"), "failed", "rank 1: no such folder"),
        ({"group": ["g", "h"]}, (), "starting", "rank 1 has not joined the group of rank 0"),
        ({"num_ranks": [2, 3]}, (), "starting", "rank 1 has not joined the group of rank 0"),
        ({"max_model_len": [256, 128]}, (), "starting", "rank 1 serves another model than rank 0"),
        ({"protocol": [PROTOCOL, 99]}, (), "failed", "the worker of rank 1 speaks protocol 99"),
    ],
)
async def test_no_group_is_made_of_ranks_that_do_not_belong_together(
    bus: MemoryBus, changes: dict[str, Any], states: tuple[str, ...], state: str, detail: str
) -> None:
    found = await look(bus, *ranks(bus, 2, **changes), states=states)
    assert found.group is None
    assert found.state is EngineState(state)
    assert found.detail.startswith(detail)


async def test_a_missing_rank_is_waited_for(bus: MemoryBus) -> None:
    found = await look(bus, ranks(bus, 2)[0])
    assert (found.group, found.detail) == (None, "no worker of rank 1 is ready")


async def test_an_epoch_names_all_ranks_and_ends_when_one_joins_another_group(
    bus: MemoryBus,
) -> None:
    first, second = ranks(bus, 2)
    reader = Reader(bus)
    async with running(service(bus)), working(first):
        await first.announce()
        await second.announce()
        await bus.append(Append(KEYS.requests, [encode(submit("a", range(9), max_tokens=20))]))
        await reader.until(ended("a", 20, reader))
        first.group = second.group = "another"
        second.instance = "w1 again"
        await second.announce()
        await first.announce()
        seen = await reader.until(lambda seen: len(_epochs(seen)) == 2)
    assert _epochs(seen) == [("w0", "w1"), ("w0", "w1 again")]
    steps = [message.step for message in seen if isinstance(message, StepResult)]
    assert steps == list(range(1, len(steps) + 1)), "rank 0 alone appends results"


def _epochs(seen: list[Any]) -> list[tuple[str, ...]]:
    return [message.workers for message in seen if isinstance(message, EpochStarted)]
