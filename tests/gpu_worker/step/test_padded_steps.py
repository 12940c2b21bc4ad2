"""Steps that are padded to a few sizes give the same tokens."""

from itertools import pairwise

import pytest
import torch

from gpu_worker.startup.build import Worker
from gpu_worker.step.buckets import Bucket, Buckets, decode_sizes, mixed_sizes
from gpu_worker.step.executor import Executor
from gpu_worker.step.inputs import StepInputs
from gpu_worker.step.model_runner import StepRunner
from tests.gpu_worker.conftest import MakeWorker, poison, prompt
from tests.gpu_worker.everything import everything
from tests.gpu_worker.overlapping import Overlapping
from tests.gpu_worker.planner import Planner
from tests.support.models import SERVED


class Noted:
    """Runs steps, and records their sizes."""

    def __init__(self, runner: StepRunner) -> None:
        self.seen: list[tuple[Bucket | None, int, int]] = []
        self._runner = runner

    def run(self, inputs: StepInputs) -> torch.Tensor:
        num_seqs = len(inputs.batch.context_lens)
        self.seen.append((inputs.bucket, len(inputs.token_ids), num_seqs))
        return self._runner.run(inputs)

    def argmax(self, inputs: StepInputs) -> torch.Tensor:
        return self.run(inputs)


def padded(worker: Worker, num_tokens: int = 96, num_seqs: int = 12) -> Executor:
    """An executor like the worker's own, with buckets."""
    own = worker.executor
    own.reset()
    poison(own)
    buckets = Buckets(num_tokens, num_seqs)
    made = Executor(own._model, own.memory, own.runner._backend, own.limits, buckets=buckets)  # type: ignore[attr-defined]
    made.runner = Noted(made.runner)
    return made


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("kind", "backend"), [("llama", "reference"), *((k, "cpu") for k in SERVED)]
)
def test_padding_changes_no_token(
    make_worker: MakeWorker, kind: str, backend: str, overlap: bool
) -> None:
    worker = make_worker(kind, block_size=8, num_blocks=160, attention_backend=backend)
    expected = everything(Planner(worker.executor))
    executor = padded(worker, 512, 16)
    found = everything(Planner(Overlapping(executor) if overlap else executor))  # type: ignore[arg-type]
    assert found == expected
    assert isinstance(executor.runner, Noted)
    used = [bucket for bucket, *_ in executor.runner.seen]
    assert {bucket.decodes for bucket in used if bucket is not None} == {True, False}
    assert None in used, "a step that scores a prompt has a size of its own"
    for bucket, num_tokens, num_seqs in executor.runner.seen:
        assert bucket is None or (num_tokens, num_seqs) == (bucket.num_tokens, bucket.num_seqs)


@pytest.mark.parametrize("bucket", [Bucket(8, 8, True), Bucket(32, 12, False)])
def test_a_step_of_padding_reads_and_writes_nothing(
    make_worker: MakeWorker, bucket: Bucket
) -> None:
    executor = padded(make_worker("llama", block_size=8))
    inputs = executor._writer.padding(bucket)
    logits = executor.runner.run(inputs)
    assert logits.shape == (bucket.num_seqs, executor.limits.vocab_size)
    for cache in executor.memory.layers.values():
        assert cache.key.isnan().all()
        assert cache.value.isnan().all()


def test_a_padded_step_is_always_at_the_same_addresses(make_worker: MakeWorker) -> None:
    executor = padded(make_worker("llama", block_size=8, num_blocks=600))
    bucket = Bucket(8, 8, True)
    first = executor._writer.padding(bucket).token_ids.data_ptr()
    planner = Planner(executor)
    planner.admit(1, prompt(300))
    planner.step(s1=300)
    planner.run(1, 3)
    for handle in range(2, 12):  # a step larger than the buffers
        planner.admit(handle, prompt(400, handle))
    planner.step(**{f"s{handle}": 400 for handle in range(2, 12)})
    planner.run(2, 3)
    assert executor._writer.padding(bucket).token_ids.data_ptr() == first


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 255, 256, 257, 300, 1000])
def test_sizes_rise_to_the_largest_step_and_waste_little(most: int) -> None:
    decodes, mixed = decode_sizes(most), mixed_sizes(most)
    for sizes in (decodes, mixed):
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
    for low, high in pairwise(mixed):
        assert high - low <= max(8, low // 4)
    for low, high in pairwise(decodes):
        assert high - low <= max(8, low // 4)


def test_no_graph_is_made_for_steps_that_compute_long() -> None:
    assert max(bucket.num_tokens for bucket in Buckets(8192, 64)) == 1024
    assert Buckets(8192, 64).choose(1025, 3, False) is None
    assert Buckets(8192, 64).choose(65, 65, True) is None


def test_the_smallest_size_that_has_room_serves_a_step() -> None:
    buckets = Buckets(512, 40)
    assert buckets.choose(3, 3, True) == Bucket(4, 4, True)
    assert buckets.choose(33, 33, True) == Bucket(40, 40, True)
    assert buckets.choose(33, 2, False) == Bucket(40, 40, False)
    assert buckets.choose(70, 12, False) == Bucket(80, 40, False)
    assert buckets.choose(12, 1, False) == Bucket(16, 16, False)
    assert [bucket.num_tokens for bucket in buckets][:2] == [512, 448]
