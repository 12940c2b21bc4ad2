"""Counting by plans gives the same as a pass over every running sequence."""

from itertools import product

import numpy as np
import pytest

from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.system import SimRequest
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from scheduler_svc.core.scheduler import Scheduler

WORKER = WorkerModel(find_model("OPT-13B"), find_gpu("A100-40G"))
_CASES = list(product(("recompute", "swap"), (1, 2, 3), (1, 3), (1, 16)))


def _reserved(core: Scheduler) -> int:
    """Slots of last blocks that a token of the same request will fill."""
    found: dict[int, int] = {}
    for group in core.running:
        final = group.num_prompt_tokens + group.max_output - 1
        for sequence in group.sequences:
            if table := sequence.block_table:
                num_tokens = group.kv_tokens_at(core.planned_step, sequence)
                slots = len(table) * core.config.block_size
                found[table[-1]] = min(slots, final) - num_tokens
    return sum(found.values())


@pytest.mark.parametrize(("preemption", "plans_in_flight", "num_samples", "block_size"), _CASES)
def test_memory_equals_the_sum_over_the_tables_of_running_sequences(
    preemption: str, plans_in_flight: int, num_samples: int, block_size: int
) -> None:
    config = PageStreamConfig(
        block_size=block_size,
        max_num_sequences=32,
        max_num_batched_tokens=96,
        max_plans_in_flight=plans_in_flight,
        kv_slots=480,
        max_model_len=256,
        preemption=preemption,
    )
    system, core_size = PageStream(WORKER, config), 480 // block_size * block_size
    random = np.random.default_rng(plans_in_flight)
    num_steps = 0
    for number in range(2_000):
        if number < 40:
            prompt, output = (int(found) for found in random.integers(1, 60, 2))
            system.submit(SimRequest(number, 0.0, prompt, output, num_samples))
        if system.start(0.0) is None:
            break
        stats, use = system.core.stats(), system.memory()
        assert use.token_states == stats.num_kv_tokens
        assert use.shared == stats.num_shared_blocks * block_size
        assert use.free == core_size - stats.num_used_blocks * block_size
        assert use.reserved == _reserved(system.core)
        parts = (use.token_states, use.reserved, use.internal, use.external, use.free)
        assert sum(parts) == use.total == 480
        system.finish(0.0)
        num_steps += 1
    assert system.core.num_requests == 0
    assert num_steps > 100
    assert system.num_preemptions > 0


def test_once_there_are_beams_every_sequence_is_looked_at() -> None:
    config = PageStreamConfig(kv_slots=2_400, max_model_len=256)
    system = PageStream(WORKER, config)
    system.submit(SimRequest(0, 0.0, 20, 30))
    system.submit(SimRequest(1, 0.0, 20, 30, beam_width=4))
    shared = 0
    while system.start(0.0) is not None:
        use, stats = system.memory(), system.core.stats()
        assert use.token_states == stats.num_kv_tokens
        assert use.shared == stats.num_shared_blocks * 16
        assert use.reserved == _reserved(system.core)
        shared += use.shared
        system.finish(0.0)
    assert shared > 0
