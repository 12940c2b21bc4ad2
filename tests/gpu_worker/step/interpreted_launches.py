"""What a GPU launches for a step, counted in Triton's interpreter; see tests/support."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gpu_worker.kv.memory import PagedMemory
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.fusion.gpu_fusion import GpuFusion, fuse_on_gpu
from gpu_worker.model.loader import load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from kernels.interface import RaggedBatch
from kernels.triton.backend import TritonBackend
from tests.support.launches import counted_launches
from tests.support.models import tiny_model

CPU = torch.device("cpu")
NUM_SEQS, BLOCK_SIZE = 2, 16


@dataclass
class Fused:
    """A model with the layers of GPUs, and a pool full of NaN."""

    model: RaggedModel
    memory: PagedMemory
    done: GpuFusion

    def launches(self, num_rows: int, context: int) -> Counter[str]:
        """Those of the forward pass of two sequences, of so many rows and tokens each."""
        num_tokens, width = NUM_SEQS * num_rows, -(-context // BLOCK_SIZE)
        positions = torch.arange(context - num_rows, context).repeat(NUM_SEQS)
        tables = torch.arange(NUM_SEQS * width, dtype=torch.int32).view(NUM_SEQS, width)
        owners = torch.arange(NUM_SEQS).repeat_interleave(num_rows) * width * BLOCK_SIZE
        batch = RaggedBatch(
            slot_mapping=owners + positions,
            block_tables=tables,
            context_lens=torch.full((NUM_SEQS,), context, dtype=torch.int32),
            query_starts=torch.arange(NUM_SEQS + 1, dtype=torch.int32) * num_rows,
            max_query_len=num_rows,
            max_context_len=context,
        )
        step = PagedStep(TritonBackend(num_processors=16), self.memory.caches, batch)
        token_ids = torch.arange(num_tokens) + 3
        with counted_launches() as launches:
            self.model.forward(token_ids, positions, step, rows=None)
        return launches


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Fused]:
    """A Llama of one layer, and one of two."""
    found = []
    for num_layers in (1, 2):
        path: Path = tiny_model("llama", tmp_path_factory.mktemp("m"), num_hidden_layers=num_layers)
        model = load_model(WorkerSettings(model=str(path), dtype="float32"), CPU)
        shapes = model.observe_layers()
        done = fuse_on_gpu(model.model, [shape.module for shape in shapes])
        found.append(Fused(model, PagedMemory(shapes, 96, BLOCK_SIZE, CPU), done))
    return found


# Beside attention: four products of matrices, and four small kernels.
LAYER = {"mm": 4, "rotate_write_kernel": 1, "add_rms_norm_kernel": 2, "silu_gate_kernel": 1}


@pytest.mark.parametrize(
    ("num_rows", "context", "attention"),
    [
        (1, 40, {"paged_attention_kernel": 1}),
        (1, 600, {"paged_attention_kernel": 1, "merge_kernel": 1}),  # split into pieces
        (9, 40, {"paged_attention_kernel": 2}),  # sequences of few rows, and of many
    ],
    ids=["decode", "decode_of_long_contexts", "prefill"],
)
def test_a_layer_launches_as_little_as_its_table_says(
    models: list[Fused], num_rows: int, context: int, attention: dict[str, int]
) -> None:
    """The figures are those of docs/design/gpu.md."""
    one, two = (model.launches(num_rows, context) for model in models)
    assert two - one == LAYER | attention
    # The rotary tables, the embedding, the first normalization and the product with the head.
    rest = one - (two - one)
    assert rest.total() == 10
    assert rest["rms_norm_kernel"] == rest["embedding"] == rest["mm"] == 1
