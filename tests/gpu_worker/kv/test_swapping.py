"""Swapping: blocks go to the host pool and come back."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch.plan_checks import PlanRefused
from gpu_worker.kv import pool_sizes
from gpu_worker.kv.memory import PagedMemory, bytes_per_block
from gpu_worker.model.ragged_model import LayerShape
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker
from gpu_worker.step.executor import Executor
from kernels.block_packing import whole_blocks
from kernels.interface import AttentionParams, LayerCache
from shared.errors import SettingsError
from shared.messages.plans import Admission
from tests.gpu_worker.conftest import MakeWorker, poison, prompt
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan

DRAWN = sampling(temperature=1.0, top_k=200, seed=5)
NUM_TOKENS = 12
CPU = torch.device("cpu")


def layer_shapes(*dtypes: torch.dtype) -> list[LayerShape]:
    """Layers that differ in every field of their shapes."""
    return [
        LayerShape(torch.nn.Identity(), 1 + index, 16 * (2 - index), dtype, AttentionParams(1.0))
        for index, dtype in enumerate(dtypes)
    ]


def filled(memory: PagedMemory) -> list[torch.Tensor]:
    """Put random content into the pool; a copy of keys and values of each layer."""
    generator = torch.Generator().manual_seed(3)
    for cache in memory.layers.values():
        for pool in (cache.key, cache.value):
            pool.copy_(torch.randn(pool.shape, generator=generator))
    return contents(memory)


def contents(memory: PagedMemory) -> list[torch.Tensor]:
    return [pool.clone() for cache in memory.layers.values() for pool in (cache.key, cache.value)]


def assert_holds(memory: PagedMemory, before: list[torch.Tensor], origin: dict[int, int]) -> None:
    """Assert that each block holds what ``origin`` held before, and others are unchanged."""
    for now, then in zip(contents(memory), before, strict=True):
        sources = [origin.get(block, block) for block in range(len(now))]
        assert torch.equal(now, then[sources])


LAYOUTS = ("layer_major", "block_major")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_content_comes_back_in_all_layers(block_size: int, layout: str) -> None:
    shapes = layer_shapes(torch.float32, torch.bfloat16)
    memory = PagedMemory(shapes, 6, block_size, CPU, num_host_blocks=4, layout=layout)
    assert memory.geometry.num_host_blocks == 4
    before = filled(memory)
    memory.swap_out(ints(5, 2, 5), ints(0, 3, 1))
    assert_holds(memory, before, {})
    memory.swap_in(ints(3, 1, 3, 0), ints(0, 1, 5, 2))  # one of them to two blocks
    assert_holds(memory, before, {0: 2, 1: 5, 5: 2, 2: 5})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_reach_all_layers(layout: str) -> None:
    shapes = layer_shapes(torch.float32, torch.bfloat16)
    memory = PagedMemory(shapes, 6, 8, CPU, layout=layout)
    before = filled(memory)
    memory.copy(ints(5, 2, 5), ints(0, 3, 1))
    assert_holds(memory, before, {0: 5, 3: 2, 1: 5})


def test_a_block_major_pool_is_one_allocation_and_its_blocks_are_pieces_of_it() -> None:
    memory = PagedMemory(layer_shapes(torch.float32, torch.bfloat16), 6, 4, CPU, 0, "block_major")
    whole = whole_blocks(list(memory.layers.values()))
    assert whole is not None
    assert whole.shape == (6, memory.geometry.bytes_per_block)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_content_comes_back_to_a_gpu(layout: str) -> None:
    shapes = layer_shapes(torch.float32, torch.bfloat16)
    device = torch.device("cuda")
    memory = PagedMemory(shapes, 6, 4, device, num_host_blocks=4, layout=layout)
    before = filled(memory)
    memory.swap_out(ints(5, 2, 5), ints(0, 3, 1))
    memory.swap_in(ints(3, 1, 3, 0, 0), ints(0, 1, 5, 2, 3))
    assert_holds(memory, before, {0: 2, 1: 5, 5: 2, 2: 5, 3: 5})


MEMORIES = (
    {"kv_memory": "paged"},
    {"kv_memory": "paged", "kv_layout": "block_major"},
    {"kv_memory": "virtual"},
)


@pytest.fixture(scope="module", params=MEMORIES, ids=str)
def llama(request: pytest.FixtureRequest, make_worker: MakeWorker) -> Worker:
    """A worker with a tiny Llama and blocks of eight tokens, in memory of each kind."""
    return make_worker("llama", block_size=8, **request.param)


def alone(executor: Executor, tokens: list[int], choice: int = 0) -> list[int]:
    """The output of a sequence that is never swapped."""
    executor.reset()
    planner = Planner(executor, seed=1)
    planner.admit(1, tokens, DRAWN, choice=choice)
    planner.step(s1=len(tokens))
    output = list(planner.run(1, NUM_TOKENS))[:NUM_TOKENS]
    executor.reset()
    return output


def back_again(handle: int, tokens: list[int], blocks: list[int], **changes: Any) -> Admission:
    """An admission in which only the last token is to be computed."""
    values: dict[str, Any] = {
        "handle": handle,
        "choice": 0,
        "tokens": np.array(tokens, np.int32),
        "num_prompt_tokens": len(tokens) - 5,
        "num_computed": len(tokens) - 1,
        "block_table": ints(*blocks),
        "sampling": DRAWN,
    }
    return Admission(**{**values, **changes})


@pytest.mark.parametrize("length", [5, 8, 11, 12, 20])
def test_a_swapped_sequence_goes_on_under_its_handle(executor: Executor, length: int) -> None:
    expected = alone(executor, prompt(length))
    planner = Planner(executor)
    planner.admit(1, prompt(length), DRAWN)
    planner.step(s1=length)
    tokens = prompt(length) + planner.run(1, 5)
    gone = planner.known[1].blocks
    hosts = ints(*range(63, 63 - len(gone), -1))
    out = {"swap_out_device": ints(*gone), "swap_out_host": hosts}
    assert executor.execute(step_plan(6, retired=ints(1), **out)).num_batched_tokens == 0
    poison(executor)
    # The last token is not computed yet: it may need a block that no swap fills.
    blocks = list(range(40, 40 + -(-len(tokens) // 8)))
    plan = step_plan(
        7,
        swap_in_host=hosts,
        swap_in_device=ints(*blocks[: len(hosts)]),
        admissions=(back_again(1, tokens, blocks),),
        chunk_handles=ints(1),
        chunk_tokens=ints(1),
    )
    assert executor.execute(plan).tokens.tolist() == expected[5:6]
    if len(tokens) % 8:  # or it needs a block
        assert executor.execute(step_plan(8)).tokens.tolist() == expected[6:7]


def test_choices_still_share_what_they_shared(executor: Executor) -> None:
    expected = [alone(executor, prompt(14), choice) for choice in (0, 1)]
    planner = Planner(executor)
    planner.admit(1, prompt(14), DRAWN)
    planner.fork(1, 2, 1)
    planner.step(s1=14)
    planner.run(1, 5)
    first, second = planner.known[1], planner.known[2]
    assert first.blocks[0] == second.blocks[0]
    device = [*first.blocks, *second.blocks[1:]]
    assert len(device) == 5
    hosts = ints(0, 1, 2, 3, 4)
    out = {"swap_out_device": ints(*device), "swap_out_host": hosts}
    executor.execute(step_plan(6, retired=ints(1, 2), **out))
    poison(executor)
    admissions = (
        back_again(1, prompt(14) + first.output, [7, 8, 9]),
        back_again(2, prompt(14) + second.output, [7, 10, 11], choice=1),
    )
    plan = step_plan(
        7,
        swap_in_host=hosts,
        swap_in_device=ints(7, 8, 9, 10, 11),
        admissions=admissions,
        chunk_handles=ints(1, 2),
        chunk_tokens=ints(1, 1),
    )
    assert executor.execute(plan).tokens.tolist() == [output[5] for output in expected]


def test_blocks_go_before_others_come_and_are_copied_last(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(3))
    planner.step(s1=2)
    [own] = planner.known[1].blocks
    others = [block for block in range(5) if block != own][:3]
    caches: list[LayerCache] = list(executor.memory.layers.values())
    for block in (own, *others):
        for cache in caches:
            cache.key[block] = block
    gone, filled, target = others
    plan = step_plan(
        2,
        swap_out_device=ints(gone, own),
        swap_out_host=ints(9, 8),
        swap_in_host=ints(9, 8, 9),
        swap_in_device=ints(own, gone, filled),
        copy_sources=ints(own),
        copy_targets=ints(target),
        replaced_handles=ints(1),
        replaced_columns=ints(0),
    )
    executor.execute(plan)
    for cache in caches:
        found = [float(cache.key[block].max()) for block in (own, gone, filled, target)]
        assert found == [gone, own, gone, gone]


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("1 and 2 blocks", {"swap_out_device": ints(1), "swap_out_host": ints(1, 2)}),
        ("1 and 0 blocks", {"swap_in_host": ints(), "swap_in_device": ints(1)}),
        ("no block 64", {"swap_out_device": ints(1, 64), "swap_out_host": ints(1, 2)}),
        ("no block -1", {"swap_in_host": ints(1), "swap_in_device": ints(-1)}),
        ("no host block 64", {"swap_out_device": ints(1, 2), "swap_out_host": ints(64, 0)}),
        ("no host block -1", {"swap_in_host": ints(-1), "swap_in_device": ints(1)}),
        ("swapped to twice", {"swap_out_device": ints(1, 2), "swap_out_host": ints(3, 3)}),
        ("swapped to twice", {"swap_in_host": ints(1, 2), "swap_in_device": ints(3, 3)}),
    ],
)
def test_swaps_that_cannot_be_are_refused(
    executor: Executor, why: str, fields: dict[str, Any]
) -> None:
    assert executor.limits.kv.num_host_blocks == 64
    with pytest.raises(PlanRefused, match=why):
        executor.execute(step_plan(1, **fields))


def test_the_host_pool_is_as_large_as_it_may_be(make_worker: MakeWorker) -> None:
    def num_host_blocks(**settings: Any) -> int:
        return make_worker("llama", **settings).executor.limits.kv.num_host_blocks

    each = make_worker("llama").executor.limits.kv.bytes_per_block
    assert num_host_blocks() == 64
    assert num_host_blocks(num_host_blocks=7, host_kv_memory_bytes=0) == 7
    assert num_host_blocks(num_host_blocks=0) == 0
    assert num_host_blocks(host_kv_memory_bytes=0) == 0
    assert num_host_blocks(host_kv_memory_bytes=100 * each + 1) == 100
    with pytest.raises(SettingsError, match="--host-kv-memory-bytes=100"):
        make_worker("llama", host_kv_memory_bytes=100)


def test_by_itself_the_host_pool_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = layer_shapes(torch.float32)
    each = bytes_per_block(shapes, 16)
    monkeypatch.setattr(pool_sizes, "available_memory", lambda: 1000 * each)
    settings = WorkerSettings()
    assert pool_sizes.choose_num_host_blocks(settings, shapes, 64) == 64
    assert pool_sizes.choose_num_host_blocks(settings, shapes, 640) == 100
    monkeypatch.setattr(pool_sizes, "available_memory", lambda: 2**50)
    assert pool_sizes.choose_num_host_blocks(settings, shapes, 2**40) == 4 * 2**30 // each


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 1}, {"num_blocks": 1, "block_size": 1}, {"num_host_blocks": 1}],
    ids=str,
)
def test_speeds_are_measured_and_leave_nothing(
    make_worker: MakeWorker, settings: dict[str, Any]
) -> None:
    worker = make_worker("llama", **settings)
    assert worker.speeds.prefill_tokens_per_s > 1
    assert worker.speeds.swap_bytes_per_s > 1000
    assert len(worker.executor.batch) == 0
    assert not worker.executor.batch.decodes.any()


def test_without_a_host_pool_there_is_a_speed_to_divide_by(make_worker: MakeWorker) -> None:
    worker = make_worker("llama", num_host_blocks=0)
    assert worker.speeds.swap_bytes_per_s > 0
