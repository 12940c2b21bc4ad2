"""On CPUs ``--deterministic`` gives a token the same logits by decodes and by chunks.

With bf16 dot products the logits are the same without it as well.
"""

import dataclasses

import pytest
import torch

from gpu_worker.model.attention import PagedStep
from gpu_worker.startup.build import Worker
from kernels.cpu.runtime.instruction_set import best_dot, detect
from tests.gpu_worker.conftest import MakeWorker
from tests.gpu_worker.model.graph.test_captured_layers import BLOCK_SIZE, captured, ragged

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

KINDS = ["llama", "mistral", "gemma2"]
NUM_TOKENS = 40


def last_logits(worker: Worker, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits [V] after the last token, computed in the given chunks over fixed blocks."""
    executor, begin, rows = worker.executor, 0, torch.empty(0)
    whole = ragged([len(tokens)], [len(tokens)])
    for size in chunks:
        end = begin + size
        batch = dataclasses.replace(
            whole,
            slot_mapping=whole.slot_mapping[begin:end],
            context_lens=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, size], dtype=torch.int32),
            max_query_len=size,
            max_context_len=end,
        )
        step = PagedStep(executor.runner._backend, executor.memory.caches, batch)
        positions = torch.arange(begin, end)
        rows = executor._model.forward(tokens[begin:end], positions, step, rows=None)
        begin = end
    return rows[-1].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_token_and_one_in_a_chunk_have_the_same_logits(
    kind: str, dtype: str, make_worker: MakeWorker
) -> None:
    worker = make_worker(kind, dtype=dtype, block_size=BLOCK_SIZE, deterministic=True)
    assert_same_in_chunks(worker)


@pytest.mark.skipif(not best_dot().of_pairs, reason="this CPU multiplies elements")
@pytest.mark.parametrize("kind", KINDS)
def test_by_pairs_that_is_so_anyway(kind: str, make_worker: MakeWorker) -> None:
    assert_same_in_chunks(make_worker(kind, dtype="bfloat16", block_size=BLOCK_SIZE))


def assert_same_in_chunks(worker: Worker) -> None:
    """Assert that tokens decoded one by one end in the same logits as tokens computed at once."""
    assert captured(worker) is not None  # a graph has the arguments that the backend wrote
    tokens = torch.randint(4096, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    expected = last_logits(worker, tokens, [20] + [1] * 20)
    for chunks in ([40], [37, 3], [3, 37], [16, 16, 8], [39, 1]):
        assert torch.equal(last_logits(worker, tokens, chunks), expected), chunks
