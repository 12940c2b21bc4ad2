"""A mapping that fails in the middle of things costs time, and no token."""

from itertools import count
from pathlib import Path

import pytest

from gpu_worker.kv.cpu_mapping import CpuMapper
from gpu_worker.kv.mapping import MapError
from shared.bus.redis_bus import RedisBus
from tests.integration.configurations import Configuration, serve
from tests.support.requests import submit

REQUESTS = [
    submit(f"r{index}", list(range(3, 20 + 9 * index)), temperature=0.9, seed=index, max_tokens=40)
    for index in range(4)
]


class FailingMapper(CpuMapper):
    """Two calls fail, after the start, and before the requests have ended.

    At the start, 41 sequences measure the time of a decode. The first of the two may be made ahead
    of time, which disturbs no sequence; the next is the step's own.
    """

    calls = count(1)

    def map(self, place: int, block: int, count: int) -> None:
        if next(self.calls) in (80, 81):
            raise MapError("the system is out of memory")
        super().map(place, block, count)


async def test_a_failed_mapping_changes_no_token(
    llama: Path, redis_bus: RedisBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual = Configuration(8, kv_memory="virtual")
    expected = await serve(redis_bus, llama, virtual, REQUESTS)
    monkeypatch.setattr("gpu_worker.kv.cpu_mapping.CpuMapper", FailingMapper)
    found = await serve(redis_bus, llama, virtual, REQUESTS)
    assert next(FailingMapper.calls) > 90
    assert found.outputs() == expected.outputs()
    num_admissions = sum(len(answer.num_cached) for answer in found.answers)
    assert num_admissions > len(REQUESTS), "some were meant to be admitted again"
