"""Compiled layers in the place of transformers' own: which, and that they compute the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from gpu_worker.model.fusion.activations import find_activation
from gpu_worker.model.fusion.cpu_fusion import Fusion, fuse
from gpu_worker.model.fusion.shared_input import SharedInput
from gpu_worker.model.loader import load_model
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from kernels.cpu.elementwise.elementwise import Activation
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.weight_packing import pack
from kernels.cpu.runtime.instruction_set import detect
from shared.errors import ModelUnsupported, SettingsError
from tests.gpu_worker.conftest import ModelPath
from tests.support.models import SERVED, tiny_model

pytestmark = pytest.mark.skipif(detect() is None, reason="this CPU is not served")

CPU = torch.device("cpu")
TOKENS = torch.randint(4096, (40,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def kernels() -> CpuLayers:
    instructions = detect()
    assert instructions is not None
    return CpuLayers(instructions)


def load(path: Path, dtype: str = "float32") -> RaggedModel:
    return load_model(WorkerSettings(model=str(path), dtype=dtype), CPU)


def fused(path: Path, kernels: CpuLayers, dtype: str = "float32") -> tuple[RaggedModel, Fusion]:
    model = load(path, dtype)
    return model, fuse(model.model, kernels, model.dtype)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference of log-probabilities."""
    ours, theirs = (torch.log_softmax(logits.float(), -1) for logits in (found, expected))
    return float((ours - theirs).pow(2).mean().sqrt())


@pytest.mark.parametrize("kind", SERVED)
def test_logits_are_those_of_the_models_own_layers(
    kind: str, model_path: ModelPath, kernels: CpuLayers
) -> None:
    expected = load(model_path(kind)).eager_logits(TOKENS)
    model, found = fused(model_path(kind), kernels)
    assert found.kept == 0
    assert deviation(model.eager_logits(TOKENS), expected) < 1e-4


@pytest.mark.parametrize("kind", SERVED)
def test_bfloat16_is_as_close_to_float32_as_the_models_own_layers_are(
    kind: str, model_path: ModelPath, kernels: CpuLayers
) -> None:
    exact = load(model_path(kind)).eager_logits(TOKENS)
    own = deviation(load(model_path(kind), "bfloat16").eager_logits(TOKENS), exact)
    model, _ = fused(model_path(kind), kernels, "bfloat16")
    logits = model.eager_logits(TOKENS)
    assert 0 < deviation(logits, exact) < 1.25 * own
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"shared_inputs": 2, "gated_mlps": 2, "norms": 5, "packed": 3}),
        ("qwen3", {"shared_inputs": 2, "gated_mlps": 2, "norms": 9, "packed": 3}),
        ("gemma2", {"shared_inputs": 2, "gated_mlps": 2, "norms": 9, "packed": 3}),
        ("phi3", {"shared_inputs": 0, "gated_mlps": 2, "norms": 5, "packed": 5}),
        ("gpt2", {"packed": 9, "embeddings_shared": 1, "norms": 5, "activations": 2}),
        ("opt", {"shared_inputs": 2, "packed": 7, "norms": 5, "activations": 2}),
        ("gpt_neox", {"packed": 9, "norms": 5, "activations": 2}),
    ],
)
def test_layers_are_found_by_their_names(
    kind: str, expected: dict[str, int], model_path: ModelPath, kernels: CpuLayers
) -> None:
    _, found = fused(model_path(kind), kernels)
    assert {name: getattr(found, name) for name in expected} == expected


def test_weights_that_came_from_bfloat16_stay_as_small_in_float32(
    tmp_path: Path, kernels: CpuLayers
) -> None:
    path = tiny_model("llama", tmp_path)
    model = load(path, "bfloat16")
    model.model.save_pretrained(path)
    wide, narrow = load(path), load(path)
    before = wide.weight_bytes
    found = fuse(narrow.model, kernels, torch.float32)
    assert found.narrow == len(found.layers)
    narrow.packed_bytes = found.weight_bytes
    assert narrow.weight_bytes < 0.85 * before  # the embedding stays as it is
    expected = wide.eager_logits(TOKENS)
    assert deviation(narrow.eager_logits(TOKENS), expected) < 1e-4


def test_an_embedding_tied_to_the_output_layer_is_kept_once(
    tmp_path: Path, kernels: CpuLayers
) -> None:
    path = tiny_model("llama", tmp_path, tie_word_embeddings=True)
    expected = load(path).eager_logits(TOKENS)
    model, found = fused(path, kernels)
    assert (found.embeddings_shared, found.embeddings_copied) == (1, 0)
    assert deviation(model.eager_logits(TOKENS), expected) < 1e-4
    vocabulary = 4096 * 64
    assert sum(weight.numel() for weight in model.model.parameters()) < vocabulary
    assert sum(layers.weight.numel() for layers in found.layers) < 2 * vocabulary


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("relu", Activation.RELU),
        ("gelu", Activation.GELU),
        ("gelu_python", Activation.GELU),
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_fast", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("gelu_10", None),  # clipped
        ("quick_gelu", None),
        ("relu6", None),
        ("silu", None),
        ("prelu", None),  # with a weight of its own
    ],
)
def test_activations_are_known_by_what_they_compute(name: str, expected: Activation | None) -> None:
    assert find_activation(ACT2FN[name]) == expected


def test_a_module_from_elsewhere_is_no_activation() -> None:
    assert find_activation(nn.Flatten(0)) is None
    assert find_activation(None) is None


class Doubled(nn.Module):
    """Named like a gated MLP, but not one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48)
        self.up_proj = nn.Linear(32, 48)
        self.down_proj = nn.Linear(48, 32)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class CentredRMSNorm(nn.Module):
    """Named like an RMS normalization, but not one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (32,), self.weight)


class JoinedMLP(nn.Module):
    """Gate and up are one layer; with biases, and which is which may be the other way round."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(32, 96)
        self.down_proj = nn.Linear(48, 32)
        self.activation_fn = nn.GELU()
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.turned:
            gate, up = up, gate
        return self.down_proj(self.activation_fn(gate) * up)


@pytest.mark.parametrize("turned", [False, True])
def test_gate_and_up_projections_in_one_layer_are_distinguished(
    kernels: CpuLayers, turned: bool
) -> None:
    model = nn.Sequential(JoinedMLP(turned)).requires_grad_(False)
    x = torch.randn(1, 5, 32)
    expected = model(x)
    found = fuse(model, kernels, torch.float32)
    assert found.gated_mlps == (0 if turned else 1)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


class UncentredLayerNorm(nn.Module):
    """Named like a normalization by mean and variance, but not one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (32,), self.weight, self.eps)


class PictureLayerNorm(nn.LayerNorm):
    """One over the channels of pictures, as vision towers have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_norm_that_takes_no_rows_stays_what_it_is(kernels: CpuLayers) -> None:
    model = nn.Sequential(PictureLayerNorm(32)).requires_grad_(False)
    picture = torch.randn(1, 32, 4, 4)
    expected = model(picture)
    assert fuse(model, kernels, torch.float32).norms == 0
    assert torch.equal(model(picture), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_name_alone_does_not_make_it_one(kernels: CpuLayers, dtype: torch.dtype) -> None:
    norms = [CentredRMSNorm(), UncentredLayerNorm(), nn.LayerNorm(20), nn.LayerNorm((2, 16))]
    found = fuse(nn.Sequential(*norms).to(dtype), kernels, dtype)
    assert found.norms == 0


def test_norms_without_weights_or_biases_are_compiled(kernels: CpuLayers) -> None:
    model = nn.Sequential(
        nn.LayerNorm(32, elementwise_affine=False), nn.LayerNorm(32, bias=False), nn.LayerNorm(32)
    ).requires_grad_(False)
    model[2].get_parameter("weight").uniform_()
    model[2].get_parameter("bias").uniform_()
    x = torch.randn(1, 5, 32)
    expected = model(x)
    assert fuse(model, kernels, torch.float32).norms == 3
    torch.testing.assert_close(model(x), expected)


def test_activations_of_another_type_than_the_models_stay_what_they_were(
    kernels: CpuLayers,
) -> None:
    model = nn.Sequential(nn.GELU(), nn.ReLU())
    assert fuse(model, kernels, torch.bfloat16).activations == 2
    x = torch.randn(3, 20).half()
    assert torch.equal(model(x), nn.functional.relu(nn.functional.gelu(x)))
    columns = torch.randn(20, 3, dtype=torch.bfloat16).T
    torch.testing.assert_close(model(columns), nn.functional.gelu(columns).relu())


def test_a_name_alone_does_not_make_a_layer(kernels: CpuLayers) -> None:
    model = nn.Sequential(Doubled(), CentredRMSNorm(), nn.Linear(32, 20), nn.Linear(20, 8))
    model.requires_grad_(False)
    x = torch.randn(1, 5, 32)
    expected = model(x)
    found = fuse(model, kernels, torch.float32)
    assert (found.gated_mlps, found.norms) == (0, 0)
    assert (found.packed, found.kept) == (4, 1)  # 20 inputs do not fill vectors
    torch.testing.assert_close(model(x), expected)


def test_a_layer_whose_weight_is_read_is_not_replaced(
    model_path: ModelPath, kernels: CpuLayers
) -> None:
    expected = load(model_path("hunyuan_v1_moe")).eager_logits(TOKENS)
    model, found = fused(model_path("hunyuan_v1_moe"), kernels)
    assert found.kept == 2  # a router of each layer
    assert found.shared_inputs == 2
    assert deviation(model.eager_logits(TOKENS), expected) < 1e-4


def test_layers_that_share_an_input_are_right_for_any_calls(kernels: CpuLayers) -> None:
    weights = [torch.randn(n, 32) for n in (48, 16, 16)]
    shared = SharedInput(kernels.linear(pack(weights), torch.float32))
    first, second = torch.randn(2, 32), torch.randn(3, 32)
    for index, x in ((2, first), (0, first), (0, first), (1, second), (1, first), (2, second)):
        torch.testing.assert_close(shared.output(index, x), x @ weights[index].T)
    first.zero_()
    assert not shared.output(0, first).any()


def test_compiled_layers_can_be_switched_off(model_path: ModelPath) -> None:
    def layers(**settings: Any) -> set[str]:
        worker = build_worker(
            WorkerSettings(model=str(model_path("llama")), device="cpu", num_blocks=8, **settings)
        )
        return {type(module).__name__ for module in worker.executor._model.model.modules()}

    assert "GatedMLP" in layers()
    assert {"LlamaMLP", "Linear"} <= layers(layer_kernels="off")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"layer_kernels": "off"}, "not with --layer-kernels off"),
        ({"layer_kernels": "off", "compile": True}, "not with --layer-kernels off"),
    ],
)
def test_layers_that_round_by_the_batch_are_not_deterministic(
    settings: dict[str, Any], why: str, model_path: ModelPath
) -> None:
    with pytest.raises(SettingsError, match=why) as raised:
        build_worker(
            WorkerSettings(
                model=str(model_path("llama")), device="cpu", deterministic=True, **settings
            )
        )
    assert raised.value.key == "--deterministic"


def test_a_model_that_computes_something_else_with_them_is_refused(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = CpuLayers.linear

    def wrong(self: CpuLayers, layers: Any, *dtypes: torch.dtype) -> Any:
        compiled = forward(self, layers, *dtypes)
        return lambda x: [out * 1.5 for out in compiled(x)]

    monkeypatch.setattr(CpuLayers, "linear", wrong)
    settings = WorkerSettings(model=str(model_path("gpt2")), device="cpu", num_blocks=8)
    with pytest.raises(ModelUnsupported, match=r"gpt2.*replaced layers.*--layer-kernels off"):
        build_worker(settings)


def test_a_rows_logits_do_not_depend_on_the_other_rows(
    model_path: ModelPath, kernels: CpuLayers
) -> None:
    model, _ = fused(model_path("llama"), kernels)
    hidden = model.model.model.norm(model.model.model.embed_tokens(TOKENS))
    whole = model.model.lm_head(hidden)
    for row in (0, 17, 39):
        assert torch.equal(model.model.lm_head(hidden[row : row + 1])[0], whole[row])
