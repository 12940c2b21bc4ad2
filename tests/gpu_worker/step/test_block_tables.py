"""Block tables of a step, as they are sent to a GPU."""

import numpy as np
import pytest
import torch

from gpu_worker.batch.rows import Rows
from gpu_worker.startup.build import Worker
from gpu_worker.step.buckets import Buckets
from gpu_worker.step.executor import Executor
from gpu_worker.step.input_buffers import StepBuffers, StepSize
from gpu_worker.step.inputs import InputWriter, StepInputs
from gpu_worker.step.token_placement import Placement
from tests.gpu_worker.conftest import poison, prompt
from tests.gpu_worker.planner import Planner, sampling

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def written(lens: list[int], flattens: bool, buckets: Buckets | None = None) -> StepInputs:
    """The inputs of a decode of sequences with so many blocks each."""
    num_blocks = np.array(lens)
    slots = np.arange(len(lens))
    tables = np.full((len(lens), max(lens)), 2**31 - 1, np.int32)
    for row, count in enumerate(lens):
        tables[row, :count] = 1000 * row + np.arange(count)
    positions = BLOCK_SIZE * num_blocks - 1
    mapping = BLOCK_SIZE * slots
    rows = Rows(slots, positions, mapping, None, (), slots, None, None, (), 0)
    placement = Placement(slots, None, positions, positions + 1, num_blocks, tables, mapping)
    size = StepSize(len(lens), len(lens), len(lens), 0, True)
    writer = InputWriter(StepBuffers(CPU, size, 4096), buckets, 4096 * BLOCK_SIZE)
    writer.flattens = flattens
    return writer.write(rows, placement, None, np.empty((2, 0), np.int32), only_samples=True)


def test_one_long_sequence_beside_many_short_ones_does_not_widen_their_tables() -> None:
    lens = [4] * 255 + [4096]
    whole, flat = (written(lens, flattens).num_bytes for flattens in (False, True))
    others = whole - 4 * 256 * 4096
    assert flat - others == 4 * (257 + 255 * 4 + 4096) == 21_492
    assert whole > 170 * (flat - others)


@pytest.mark.parametrize("buckets", [None, Buckets(16, 16)])
def test_flat_tables_have_every_block_of_every_sequence(buckets: Buckets | None) -> None:
    lens = [1, 3, 60, 2, 1]
    whole, flat = (written(lens, each, buckets) for each in (False, True))
    assert flat.num_bytes < whole.num_bytes
    assert flat.batch.block_tables.shape == whole.batch.block_tables.shape
    for row, count in enumerate(lens):
        expected = (1000 * row + torch.arange(count)).int()
        assert torch.equal(flat.batch.block_tables[row, :count], expected)


def test_tables_of_like_lengths_are_sent_as_they_are() -> None:
    lens = [5, 6, 7, 8]
    assert written(lens, flattens=True).num_bytes == written(lens, flattens=False).num_bytes


def test_tokens_do_not_depend_on_how_tables_are_sent(llama: Worker) -> None:
    own = llama.executor
    found = []
    for flattens in (False, True):
        own.reset()
        poison(own)
        executor = Executor(own._model, own.memory, own.runner._backend, own.limits)  # type: ignore[attr-defined]
        executor._writer.flattens = flattens
        planner = Planner(executor)
        planner.admit(1, prompt(150))
        for handle in range(2, 9):
            planner.admit(handle, prompt(5, handle), sampling(seed=handle))
        planner.step(s1=150, **{f"s{handle}": 5 for handle in range(2, 9)})
        planner.run(1, 8)
        found.append([seq.output for seq in planner.known.values()])
    assert found[0] == found[1]
