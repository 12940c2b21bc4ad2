"""Layers that are captured and replayed, against the same layers called one by one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

from deploy.settings import REPOSITORY
from gpu_worker.model.attention import PagedStep
from gpu_worker.model.graph import capture_pass, position_tables
from gpu_worker.model.graph.captured_layers import LayerCall, PassThroughLayer, ReplayedLayers
from gpu_worker.model.graph.direct_pass import DirectPass
from gpu_worker.model.graph.replay_check import replays_exactly, trial_plans
from gpu_worker.model.graph.torch_capture import Arena, CannotCapture, TorchCapture
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import Worker, build_worker
from kernels.cpu.elementwise.elementwise import CpuElements
from kernels.cpu.runtime.captured_graph import GraphCapture
from kernels.cpu.runtime.instruction_set import detect
from kernels.cpu.runtime.thread_team import ThreadTeam, capturing
from kernels.interface import RaggedBatch
from tests.gpu_worker.conftest import MakeWorker, ModelPath
from tests.support.models import SERVED, tiny_model

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

REPLAYED = SERVED
# Their code does more around the layers: positions are embedded, too, or logits capped.
CALLED_AROUND = {
    "opt": "embeddings are not all",
    "gpt2": "embeddings are not all",
    "gemma2": "its logits are not just",
}
BLOCK_SIZE = 8


def captured(worker: Worker) -> ReplayedLayers | None:
    """The model's replayed layers, if it has some."""
    found = [
        module
        for module in worker.executor._model.model.modules()
        if isinstance(module, ReplayedLayers)
    ]
    return found[0] if found else None


def ragged(sizes: list[int], contexts: list[int]) -> RaggedBatch:
    """Sequences of so many tokens, the last of them new, in blocks that lie scattered."""
    width = -(-max(contexts) // BLOCK_SIZE)
    tables = torch.arange(len(sizes) * width, dtype=torch.int32).flip(0).view(-1, width)
    slots = [
        tables[row, position // BLOCK_SIZE].item() * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (size, context) in enumerate(zip(sizes, contexts, strict=True))
        for position in range(context - size, context)
    ]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    return RaggedBatch(
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_starts=starts.int(),
        max_query_len=max(sizes),
        max_context_len=max(contexts),
    )


def logits(worker: Worker, batch: RaggedBatch, seed: int) -> torch.Tensor:
    """Of a step with these tokens."""
    executor = worker.executor
    step = PagedStep(executor.runner._backend, executor.memory.caches, batch)
    generator = torch.Generator().manual_seed(seed)
    num_tokens = len(batch.slot_mapping)
    tokens = torch.randint(4096, (num_tokens,), generator=generator)
    contexts, starts = batch.context_lens.tolist(), batch.query_starts.tolist()
    positions = [
        torch.arange(context - (stop - start), context)
        for context, start, stop in zip(contexts, starts, starts[1:], strict=False)
    ]
    return executor._model.forward(tokens, torch.cat(positions), step, rows=None)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", REPLAYED)
def test_replayed_layers_have_the_same_bits_for_steps_of_any_shape(
    kind: str, dtype: str, threads: int, make_worker: MakeWorker
) -> None:
    before = torch.get_num_threads()
    try:
        worker = make_worker(kind, dtype=dtype, block_size=BLOCK_SIZE, num_threads=threads)
        layers = captured(worker)
        assert layers is not None
        assert (worker.executor._model.direct_pass is None) == (kind in CALLED_AROUND)
        assert layers.captured is not None
        assert (layers.captured.embedding_ops is None) == (kind in CALLED_AROUND)
        steps = [
            ([17, 1, 30], [17, 1, 30]),  # prompts
            ([1, 1, 1], [18, 2, 31]),  # decodes
            ([1, 9, 1], [19, 11, 32]),  # both
            ([1], [20]),
            ([120], [120]),  # more rows than a task of a linear layer handles
        ]
        for seed, (sizes, contexts) in enumerate(steps):
            batch = ragged(sizes, contexts)
            replayed = logits(worker, batch, seed).clone()
            with layers.one_by_one():
                called = logits(worker, batch, seed)
            assert torch.equal(replayed, called)
            assert replayed.isfinite().all()
    finally:
        torch.set_num_threads(before)


def test_a_step_larger_than_the_captured_one_is_computed_layer_by_layer(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker("llama", block_size=BLOCK_SIZE, max_num_batched_tokens=20)
    layers = captured(worker)
    assert layers is not None
    small, large = ragged([20], [20]), ragged([21], [21])
    found = logits(worker, large, 0)
    with layers.one_by_one():
        assert torch.equal(found, logits(worker, large, 0))
        expected = logits(worker, small, 1)
    assert torch.equal(logits(worker, small, 1), expected)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", {"activation_function": "quick_gelu"}),
        ("gemma2", {"hidden_activation": "sigmoid"}),
        ("opt", {"activation_function": "prelu"}),
    ],
)
def test_layers_that_compute_with_torch_are_called_one_by_one(
    kind: str, change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model(kind, tmp_path, **change)
    with caplog.at_level("INFO"):
        worker = build_worker(WorkerSettings(model=str(path), device="cpu", num_blocks=8))
    assert captured(worker) is None
    (record,) = [each for each in caplog.records if "called one by one" in each.getMessage()]
    assert "it calls aten" in str(record.__dict__)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gpt_neox", {"hidden_act": "gelu_new"}),
        ("gemma2", {"hidden_activation": "gelu"}),
    ],
)
def test_variants_of_a_family_are_replayed_too(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(kind, tmp_path, **change)
    worker = build_worker(WorkerSettings(model=str(path), device="cpu", num_blocks=8))
    assert captured(worker) is not None


def test_without_cpu_kernels_nothing_is_captured(make_worker: MakeWorker) -> None:
    assert captured(make_worker("llama", layer_kernels="off")) is None


def test_something_between_layers_keeps_them_apart(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = modeling_llama.LlamaDecoderLayer.__call__

    def scaled(self: Any, hidden: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        return forward(self, hidden, *more, **others) * 1.0

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__call__", scaled)
    settings = WorkerSettings(model=str(model_path("llama")), device="cpu", num_blocks=8)
    with caplog.at_level("INFO"):
        worker = build_worker(settings)
    assert captured(worker) is None
    assert "something is computed between" in str([each.__dict__ for each in caplog.records])


class Scaled(nn.Module):
    """A layer that multiplies by its argument."""

    def forward(self, hidden: torch.Tensor, by: float) -> torch.Tensor:
        return hidden * by


def test_each_layer_gets_the_arguments_of_the_first_layer_called_alike() -> None:
    calls: list[LayerCall] = []
    first, second = (PassThroughLayer(calls, index) for index in range(2))
    last = ReplayedLayers(nn.ModuleList([Scaled() for _ in range(4)]), [0, 1, 2, 1], calls)
    hidden = torch.ones(1, 1, 1)
    first(hidden, 5.0)  # a pass that is not finished
    for by in (2.0, 7.0):
        out = last(second(first(hidden, by), by=3.0), 10.0)
        assert out.item() == by * 3 * 10 * 3


def test_a_replay_that_computes_something_else_is_found(make_worker: MakeWorker) -> None:
    worker = make_worker("llama")
    layers = captured(worker)
    assert layers is not None
    assert layers.captured is not None
    plans = trial_plans(worker.executor.limits)
    right = layers.captured
    elsewhere = torch.zeros_like(right.out)
    assert replays_exactly(worker.executor, layers, plans)
    model, output = worker.executor._model, right.output
    assert isinstance(model.direct_pass, DirectPass)
    assert output is not None
    assert output.logits is not None
    for wrong in (
        dataclasses.replace(output, normed=elsewhere),  # prompts
        dataclasses.replace(output, logits=torch.zeros_like(output.logits)),  # decodes
    ):
        model.direct_pass._output = wrong
        assert not replays_exactly(worker.executor, layers, plans)
    model.direct_pass = None  # the model's own code normalizes
    assert replays_exactly(worker.executor, layers, plans)
    layers.captured = dataclasses.replace(right, out=elsewhere)
    assert not replays_exactly(worker.executor, layers, plans)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_is_computed_without_its_own_code(dtype: str) -> None:
    """Its normalizations have uneven weights, as trained ones do."""
    settings = WorkerSettings(
        model=str(REPOSITORY / "models" / "demo"), device="cpu", num_blocks=8, dtype=dtype
    )
    worker = build_worker(settings)
    layers = captured(worker)
    assert layers is not None
    assert layers.captured is not None
    assert layers.captured.embedding_ops is not None  # though its embeddings are the output layer's
    assert worker.executor._model.direct_pass is not None


def why_called_around(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The log record of a model whose own code runs around its layers."""
    with caplog.at_level("INFO"):
        worker = build_worker(WorkerSettings(model=str(path), device="cpu", num_blocks=8))
    assert captured(worker) is not None
    assert worker.executor._model.direct_pass is None
    (record,) = [each for each in caplog.records if each.getMessage() == "layers captured"]
    return str(record.__dict__)


@pytest.mark.parametrize("kind", CALLED_AROUND)
def test_the_log_has_the_reason_why_a_models_own_code_runs_around_its_layers(
    kind: str, model_path: ModelPath, caplog: pytest.LogCaptureFixture
) -> None:
    assert CALLED_AROUND[kind] in why_called_around(model_path(kind), caplog)


def test_embeddings_that_depend_on_the_longest_sequence_are_no_table(
    model_path: ModelPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def stretched(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, position_ids * (2 if position_ids.max() > 100 else 1))

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", stretched)
    assert "more than positions" in why_called_around(model_path("llama"), caplog)


def test_long_tables_are_not_made(
    model_path: ModelPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_tables, "_MOST_BYTES", 4096)
    assert "positions would be too large" in why_called_around(model_path("llama"), caplog)


def test_many_rows_of_logits_are_not_kept(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_pass, "_MOST_LOGITS_BYTES", 4096)
    worker = make_worker("llama", block_size=BLOCK_SIZE)
    layers = captured(worker)
    assert layers is not None
    assert layers.captured is not None
    assert layers.captured.output is not None
    assert layers.captured.output.logits is None
    prompts = ragged([3, 9], [3, 9])
    direct = logits(worker, prompts, 0)
    with layers.one_by_one():
        assert torch.equal(direct, logits(worker, prompts, 0))


def test_a_computation_before_the_output_layer_is_found(
    model_path: ModelPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaModel.forward

    def scaled(self: Any, *args: Any, **others: Any) -> Any:
        found = forward(self, *args, **others)
        found.last_hidden_state = found.last_hidden_state * 0.5
        return found

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", scaled)
    assert "something is computed before its output layer" in why_called_around(
        model_path("llama"), caplog
    )


def test_a_direct_pass_that_computes_otherwise_is_not_used(
    model_path: ModelPath, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = DirectPass.logits
    monkeypatch.setattr(DirectPass, "logits", lambda *args: logits(*args) * 2)
    why_called_around(model_path("llama"), caplog)
    assert "a replay computes otherwise" in caplog.text


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_smallest_pools_do(num_blocks: int, model_path: ModelPath) -> None:
    worker = build_worker(
        WorkerSettings(
            model=str(model_path("llama")), device="cpu", num_blocks=num_blocks, block_size=1
        )
    )
    assert not worker.executor.batch.taken.any()


def test_freed_memory_is_given_out_again() -> None:
    arena = Arena()
    first = arena.empty((4, 16), torch.bfloat16)
    view, address = first[1:].transpose(0, 1), first.data_ptr()
    assert address % 64 == 0
    del first
    other = arena.empty((4, 16), torch.bfloat16)
    assert other.data_ptr() != address  # a view is left
    del view
    again = arena.empty((8, 8), torch.bfloat16)
    assert again.data_ptr() == address
    assert arena.nbytes == 2 * 128


def test_only_what_is_the_same_in_every_step_is_a_number() -> None:
    arena, factor = Arena(), torch.tensor(3.0)
    capture = GraphCapture()
    with capturing(capture), TorchCapture(arena, CpuElements(ThreadTeam())):
        x = torch.empty(2, 16, dtype=torch.float32)
        x * factor
        assert len(capture.ops) == 1
        with pytest.raises(CannotCapture, match="mul"):
            x * x[0, 0]
        with pytest.raises(CannotCapture, match="copy"):
            x[0, 0].to(torch.bfloat16)


def test_nothing_is_looked_up_but_by_token_ids() -> None:
    table, capture = torch.zeros(5, 16), GraphCapture()
    token_ids, others = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with capturing(capture), TorchCapture(Arena(), CpuElements(ThreadTeam()), token_ids):
        assert functional.embedding(token_ids, table).shape == (3, 16)
        assert len(capture.ops) == 1
        with pytest.raises(CannotCapture, match="embedding"):
            functional.embedding(others, table)
        with pytest.raises(CannotCapture, match="embedding_renorm"):
            functional.embedding(token_ids, table, max_norm=1.0)
