"""A worker with virtual memory: the same tokens, and its use of memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_worker.kv.mapping import MapError, MappingFailed
from gpu_worker.kv.pool_sizes import choose_num_blocks
from gpu_worker.kv.virtual_memory import VirtualMemory
from gpu_worker.observer import Observer
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker
from gpu_worker.step.executor import Executor
from shared.errors import SettingsError
from shared.metrics import WorkerMetrics
from tests.gpu_worker.conftest import MakeWorker, poison, prompt
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan
from tests.support.models import SERVED

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4  # of the tiny Llama
DRAWN = sampling(temperature=1.0, top_k=200, seed=5)


@pytest.fixture(scope="module")
def worker(make_worker: MakeWorker) -> Worker:
    return make_worker("llama", kv_memory="virtual")


@pytest.fixture
def executor(worker: Worker) -> Iterator[Executor]:
    worker.executor.reset()
    poison(worker.executor)
    yield worker.executor
    worker.executor.reset()


def memory_of(executor: Executor) -> VirtualMemory:
    assert isinstance(executor.memory, VirtualMemory)
    return executor.memory


def in_use(executor: Executor) -> int:
    """Physical blocks in use, by the bytes that the memory reports."""
    num_bytes = memory_of(executor).mapping.in_use_bytes
    assert num_bytes % BLOCK_BYTES == 0
    return num_bytes // BLOCK_BYTES


def mixed(executor: Executor) -> list[list[int]]:
    """Chunks, forks, a cached prefix and reused slots; outputs of all sequences."""
    planner = Planner(executor)
    planner.admit(1, prompt(45), DRAWN)
    planner.fork(1, 2, 1)
    planner.step(s1=45)
    planner.admit(3, prompt(40) + prompt(9, 3), like=1, num_computed=32)
    planner.admit(4, prompt(70, 4))
    planner.step(s3=17, s4=31)
    planner.step(s4=39)
    planner.run(2, 12)
    first = planner.retire(1)
    planner.admit(5, prompt(20, 5), DRAWN)
    planner.step(s5=20)
    planner.run(4, 20)
    return [first.output, *(seq.output for seq in planner.known.values())]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, None) for kind in SERVED]
    + [("gemma2", "reference"), ("mistral", "sdpa"), ("gemma2", "sdpa")],
)
def test_tokens_are_those_of_paged_memory(
    kind: str, backend: str | None, make_worker: MakeWorker
) -> None:
    paged = make_worker(kind).executor
    virtual = make_worker(kind, kv_memory="virtual", attention_backend=backend).executor
    assert mixed(virtual) == mixed(paged)


def test_blocks_in_use_are_the_physical_memory_in_use(executor: Executor) -> None:
    planner = Planner(executor)

    def blocks() -> int:
        return len({block for seq in planner.known.values() for block in seq.blocks})

    planner.admit(1, prompt(45), DRAWN)
    planner.fork(1, 2, 1)
    planner.step(s1=45)
    for handle in (3, 4):
        planner.admit(handle, prompt(32) + prompt(9, handle), like=1, num_computed=32)
    planner.step(s3=9, s4=9)
    for _ in range(30):
        planner.step()
        assert in_use(executor) == blocks()
    planner.retire(1)
    planner.step()
    assert in_use(executor) == blocks()
    for handle in (2, 3, 4):
        planner.retire(handle)
    planner.step()
    assert in_use(executor) == 0


def test_nothing_is_mapped_in_steps_that_open_no_block(executor: Executor) -> None:
    metrics = WorkerMetrics("tiny", "engine")
    observer = Observer(metrics, executor)
    planner = Planner(executor)
    planner.admit(1, prompt(BLOCK_SIZE))
    observer.step(planner.step(s1=BLOCK_SIZE), observer.snapshot(), None)
    mapped = memory_of(executor).mapping
    for _ in range(3):
        observer.step(planner.step(), observer.snapshot(), None)
    assert memory_of(executor).mapping.in_use_bytes == mapped.in_use_bytes + BLOCK_BYTES
    text = metrics.render().decode()
    assert 'worker_kv_map_seconds_count{engine="engine",model_name="tiny"} 4.0' in text
    assert (
        f'worker_kv_mapped_bytes{{engine="engine",model_name="tiny"}} {2.0 * BLOCK_BYTES}' in text
    )
    assert "worker_kv_mappings" in text


def test_a_failed_mapping_stops_the_plan_and_leaves_the_others_as_they_were(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Planner(executor, seed=1)
    expected.admit(1, prompt(25))
    expected.step(s1=25)
    expected.run(1, 8)
    executor.reset()
    mapper = memory_of(executor)._mapper
    real_map = mapper.map
    planner = Planner(executor)
    planner.admit(1, prompt(25))
    planner.step(s1=25)
    planner.run(1, 3)

    def refuse(place: int, block: int, count: int) -> None:
        raise MapError("no memory left")

    monkeypatch.setattr(mapper, "map", refuse)
    planner.admit(2, prompt(20, 2))
    before = in_use(executor)
    with pytest.raises(MappingFailed, match=r"slot \d+ cannot be mapped: no memory left"):
        planner.step(s2=20)
    assert in_use(executor) == before
    monkeypatch.setattr(mapper, "map", real_map)
    executor.reset()
    assert in_use(executor) == 0
    planner = Planner(executor, seed=2)
    planner.admit(1, prompt(25))
    planner.step(s1=25)
    assert planner.run(1, 8) == expected.known[1].output


def test_a_sequence_that_outgrows_its_range_is_refused(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(300))
    planner.step(s1=300)
    kv, most = executor.limits.kv, executor.limits.max_blocks
    blocks = [block for block in range(kv.num_blocks) if block not in planner.known[1].blocks]
    grown = blocks[: most - len(planner.known[1].blocks) + 1]
    plan = step_plan(2, grown_handles=ints(*[1] * len(grown)), grown_blocks=ints(*grown))
    before = in_use(executor)
    with pytest.raises(Exception, match="grows beyond the model's context"):
        executor.execute(plan)
    assert in_use(executor) == before


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"block_size": 4}, r"--block-size=4: .* --block-size 8 fits"),
        ({"num_blocks": 10**6}, r"--num-blocks=1000000: .*mappings.*vm\.max_map_count"),
        ({"kv_memory": "paged", "attention_backend": "sdpa"}, "'sdpa': not with .* paged"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], why: str, make_worker: MakeWorker
) -> None:
    with pytest.raises(SettingsError, match=why):
        make_worker("llama", **{"kv_memory": "virtual", **settings})


def test_by_itself_the_pool_is_no_larger_than_can_be_mapped() -> None:
    settings = WorkerSettings(block_size=8)
    assert choose_num_blocks(settings, 4096, 512) == 256 * 512 // 8
    assert choose_num_blocks(settings, 4096, 512, most_blocks=100) == 100


def test_the_check_at_load_runs_over_mapped_blocks(make_worker: MakeWorker) -> None:
    bf16 = make_worker("gemma2", kv_memory="virtual", dtype="bfloat16").executor
    planner = Planner(bf16)
    planner.admit(1, prompt(40))
    planner.step(s1=40)
    assert len(planner.run(1, 10)) == 10
    assert all(cache.key.dtype == torch.bfloat16 for cache in bf16.memory.caches.values())
