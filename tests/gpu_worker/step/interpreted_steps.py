"""GPU code around the scheduler's plans, in Triton's interpreter; see tests/support."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import GridExecutor

from gpu_worker.model.fusion.gpu_fusion import GpuFusion, fuse_on_gpu
from gpu_worker.model.loader import load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.ranks.reducer import DeviceReducer
from gpu_worker.settings import WorkerSettings
from tests.gpu_worker.conftest import MakeWorker, ModelPath, prompt
from tests.gpu_worker.model.fusion.test_cpu_fusion import CentredRMSNorm, Doubled, deviation
from tests.gpu_worker.planner import Planner, sampling
from tests.gpu_worker.ranks.rank_threads import RankThreads
from tests.gpu_worker.test_tokens_equal_generate import generate
from tests.support.models import SERVED, tiny_model

CPU = torch.device("cpu")
TOKENS = torch.randint(4096, (12,), generator=torch.Generator().manual_seed(0))


def load(path: Path, dtype: str = "float32") -> RaggedModel:
    return load_model(WorkerSettings(model=str(path), dtype=dtype), CPU)


def fused(
    path: Path, dtype: str = "float32", deterministic: bool = False
) -> tuple[RaggedModel, GpuFusion]:
    model = load(path, dtype)
    layers = [shape.module for shape in model.observe_layers()]
    return model, fuse_on_gpu(model.model, layers, deterministic)


# The layers of Mistral are those of Llama, and Gemma 3 has all that Gemma 2 has.
DIFFERENT = [kind for kind in SERVED if kind not in ("mistral", "gemma2")]


@pytest.mark.parametrize("kind", DIFFERENT)
def test_logits_are_those_of_the_models_own_layers(kind: str, model_path: ModelPath) -> None:
    own = load(model_path(kind))
    expected = own.eager_logits(TOKENS)
    model, _ = fused(model_path(kind))
    assert deviation(model.eager_logits(TOKENS), expected) < 1e-4
    assert model.weight_bytes <= 1.01 * own.weight_bytes  # factors of norms are float32


def test_bfloat16_is_as_close_to_float32_as_the_models_own_layers_are(
    model_path: ModelPath,
) -> None:
    exact = load(model_path("llama")).eager_logits(TOKENS)
    own = deviation(load(model_path("llama"), "bfloat16").eager_logits(TOKENS), exact)
    model, found = fused(model_path("llama"), "bfloat16")
    assert found.norms > 0
    # The interpreter truncates float32 where a GPU rounds it to bfloat16.
    assert 0 < deviation(model.eager_logits(TOKENS), exact) < 2 * own


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"shared_inputs": 2, "gated_mlps": 2, "norms": 5, "rotaries": 2, "kept": 3}),
        ("qwen3", {"shared_inputs": 2, "gated_mlps": 2, "norms": 9, "rotary_writes": 2, "kept": 3}),
        ("gemma2", {"shared_inputs": 2, "gated_mlps": 0, "norms": 9, "residual_sums": 2}),
        ("gpt2", {"shared_inputs": 0, "rotaries": 0, "rotary_writes": 0, "kept": 9}),
        ("phi3", {"rotaries": 2, "rotary_writes": 0, "residual_sums": 2}),
    ],
)
def test_layers_are_found_by_their_names(
    kind: str, expected: dict[str, int], model_path: ModelPath
) -> None:
    _, found = fused(model_path(kind))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_in_deterministic_mode_no_linear_layer_is_torchs(kind: str, model_path: ModelPath) -> None:
    expected = load(model_path(kind)).eager_logits(TOKENS)
    model, found = fused(model_path(kind), deterministic=True)
    assert found.kept == 0
    assert found.row_linears > 0
    assert deviation(model.eager_logits(TOKENS), expected) < 1e-4


def test_the_code_of_transformers_is_left_alone(model_path: ModelPath) -> None:
    own = load(model_path("llama"))
    kind = type(own.observe_layers()[0].module)
    before = kind.forward, dict(kind.forward.__globals__)
    _, found = fused(model_path("llama"))
    assert found.rotaries == 2
    assert (kind.forward, dict(kind.forward.__globals__)) == before


def test_a_name_alone_does_not_make_a_layer() -> None:
    model = nn.Sequential(Doubled(), CentredRMSNorm(), nn.Linear(32, 20)).requires_grad_(False)
    x = torch.randn(1, 5, 32)
    expected = model(x)
    found = fuse_on_gpu(model, [model[0]])
    assert (found.gated_mlps, found.norms, found.rotaries, found.kept) == (0, 0, 0, 4)
    torch.testing.assert_close(model(x), expected)


def rotate_pairs(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate neighbours instead of halves."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + pairs * sin

    return turned(query), turned(key)


apply_rotary_pos_emb = rotate_pairs


class Attention(nn.Module):
    """An attention module that calls a function under the name that transformers uses."""

    head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(8, 8)

    def forward(self, *arguments: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(*arguments)


def test_embeddings_that_turn_otherwise_are_kept() -> None:
    assert fuse_on_gpu(Attention(), [Attention()]).rotaries == 0


def test_in_virtual_memory_tokens_are_those_of_paged_memory(
    make_worker: MakeWorker, tmp_path: Path
) -> None:
    model = str(tiny_model("mistral", tmp_path, num_hidden_layers=1))
    # The interpreter is slow; in so few blocks no decodes are measured at the start.
    sizes = {"block_size": 16, "num_blocks": 7, "max_model_len": 72, "max_num_batched_tokens": 32}
    found = []
    for kv_memory in ("paged", "virtual"):
        settings = {"model": model, "kv_memory": kv_memory, "attention_backend": "triton", **sizes}
        planner = Planner(make_worker("mistral", **settings).executor)
        planner.admit(1, prompt(19))
        planner.fork(1, 2, 1)
        planner.step(s1=19)
        planner.admit(3, prompt(16) + prompt(3, 3), sampling(seed=5), like=1, num_computed=16)
        planner.step(s3=3)
        planner.run(3, 4)
        found.append([seq.output for seq in planner.known.values()])
    assert found[0] == found[1]
    assert len(found[0]) == 3


def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps the place in a grid in a global: ranks that are threads take turns."""
    turns, launch = threading.Lock(), GridExecutor.__call__

    def launched(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        with turns:
            launch(executor, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launched)


def test_two_ranks_have_the_tokens_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of GPUs, fused layers included, and sums that are not captured."""
    one_launch_at_a_time(monkeypatch)
    path = tiny_model("llama", tmp_path, num_hidden_layers=1)
    pair = RankThreads(2)
    group = [
        Ranks(each.collectives, DeviceReducer(each.collectives))
        for each in pair.connect(shared=False)
    ]
    settings: dict[str, Any] = {"attention_backend": "triton", "layer_kernels": "off"}
    workers, _ = pair.build(str(path), group, max_model_len=32, **settings)

    def tokens(rank: int) -> list[int]:
        model = workers[rank].executor._model
        done = fuse_on_gpu(model.model, [shape.module for shape in model.observe_layers()])
        assert (done.shared_inputs, done.gated_mlps, done.norms, done.rotaries) == (1, 1, 3, 1)
        planner = Planner(workers[rank].executor)
        planner.admit(1, prompt(12))
        planner.step(s1=12)
        return planner.run(1, 6)[:6]

    expected = generate(AutoModelForCausalLM.from_pretrained(path), prompt(12), 6)
    assert pair.run(tokens) == [expected, expected]
    pair.close()
