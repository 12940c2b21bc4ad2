"""Checkpoints of compressed-tensors: the weights are those that the library decompresses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpu_worker.model.loader import load_model
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from kernels.cpu.runtime.instruction_set import best_dot, detect
from shared.errors import ModelUnsupported
from tests.gpu_worker.conftest import MakeWorker, ModelPath, poison, prompt
from tests.gpu_worker.model.graph.test_captured_layers import BLOCK_SIZE
from tests.gpu_worker.planner import Planner
from tests.gpu_worker.test_deterministic import assert_same_in_chunks
from tests.gpu_worker.test_tokens_equal_generate import generate
from tests.support.compressed_checkpoints import W4A16, W4A16_ASYMMETRIC, W8A8, W8A16, compress

CPU = torch.device("cpu")
SCHEMES = {"W8A8": W8A8, "W8A16": W8A16, "W4A16": W4A16, "W4A16 asymmetric": W4A16_ASYMMETRIC}
PROJECTION = "model.layers.0.self_attn.q_proj"


def load(path: Path) -> RaggedModel:
    return load_model(WorkerSettings(model=str(path), dtype="float32"), CPU)


def reference(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path / "dequantized", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def changed(path: Path, **changes: Any) -> Path:
    """The checkpoint with other fields in its quantization_config; "weights" in its group."""
    config = json.loads((path / "config.json").read_text())
    quantization = config["quantization_config"]
    for key in ("weights", "input_activations"):
        if key in changes:
            group = quantization["config_groups"]["group_0"]
            group[key] = (group[key] or {}) | changes.pop(key)
    quantization |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.inference_mode()
def test_weights_and_logits_are_those_of_the_decompressed_model(
    scheme: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path = compress(model_path("llama"), tmp_path, SCHEMES[scheme])
    found, expected = load(path), reference(path)
    quantized = {
        name: module
        for name, module in found.model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert len(quantized) == 2 * 7
    assert found.num_parameters == expected.num_parameters()
    assert found.weight_bytes < 4 * found.num_parameters
    for name, module in quantized.items():
        weight = expected.get_parameter(f"{name}.weight")
        torch.testing.assert_close(module.quantized.dequantize(), weight, rtol=1e-6, atol=1e-6)
        assert module.quantized.rounds_rows is (scheme == "W8A8")
    tokens = torch.tensor(prompt(40))
    logits, exact = found.eager_logits(tokens), expected(tokens.unsqueeze(0)).logits[0]
    if scheme != "W8A8":  # which rounds activations
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(detect() is None, reason="this CPU is not served")
def test_a_step_of_w8a8_is_one_graph_with_fused_mlps(
    make_worker: MakeWorker, model_path: ModelPath, tmp_path: Path
) -> None:
    path = compress(model_path("llama"), tmp_path, W8A8)
    worker = make_worker("llama", model=str(path), dtype="bfloat16", block_size=BLOCK_SIZE)
    assert worker.model.weights == "int8 with int8 inputs"
    layers = [type(each).__name__ for each in worker.executor._model.model.modules()]
    assert layers.count("GatedMLP") == 2
    if best_dot().of_pairs:
        assert_same_in_chunks(worker)


def test_greedy_tokens_are_those_of_generate(model_path: ModelPath, tmp_path: Path) -> None:
    path = compress(model_path("llama"), tmp_path, W4A16)
    settings = WorkerSettings(
        model=str(path), dtype="float32", device="cpu", num_blocks=64, num_threads=1
    )
    worker = build_worker(settings)
    poison(worker.executor)
    planner = Planner(worker.executor)
    planner.admit(1, prompt(30))
    planner.step(s1=30)
    assert planner.run(1, 16)[:16] == generate(reference(path), prompt(30), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "fp8"}, "quantization_config.quant_method='fp8' is not served"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not served; served are"),
        ({"quantization_status": "frozen"}, "quantization_config.quantization_status='frozen'"),
        ({"format": "marlin-24"}, r"config_groups\.group_0\.format='marlin-24' is not served"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme="),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "config.sparsity_config="),
        ({"weights": {"type": "float", "num_bits": 8}}, r"group_0\.weights\.type='float'"),
        ({"weights": {"num_bits": 3}}, r"group_0\.weights\.num_bits=3 is not served"),
        ({"weights": {"group_size": 24}}, "has 64 inputs, no multiple of its group_size=24"),
        ({"weights": {"actorder": "group"}}, "quantization_config cannot be used: .*actorder"),
        (
            {"input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False}},
            r"group_0\.input_activations\.dynamic=False is not served",
        ),
    ],
)
def test_what_is_not_served_is_named(
    changes: dict[str, Any], message: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path = changed(compress(model_path("llama"), tmp_path, W4A16), **changes)
    with pytest.raises(ModelUnsupported, match=message):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop(f"{PROJECTION}.weight_scale"), f"lack {PROJECTION}.weight_scale"),
        (
            lambda found: found.update({f"{PROJECTION}.weight_g_idx": torch.arange(64)}),
            f"configuration has not, {PROJECTION}.weight_g_idx",
        ),
        (
            lambda found: found.update({f"{PROJECTION}.weight_scale": torch.ones(64, 4)}),
            rf"other shapes {PROJECTION}\.weight_scale \(\[64, 4\] instead of \[64, 2\]\)",
        ),
        (
            lambda found: found.update({f"{PROJECTION}.weight_shape": torch.tensor([64, 60])}),
            rf"{PROJECTION}: weight_shape=\(64, 60\): expected \(64, 64\)",
        ),
        (
            lambda found: found[f"{PROJECTION}.weight_scale"].fill_(torch.nan),
            rf"NaN or infinite values in {PROJECTION}\.scales",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    model_path: ModelPath,
    tmp_path: Path,
) -> None:
    path = with_tensors(compress(model_path("llama"), tmp_path, W4A16), change)
    with pytest.raises(ModelUnsupported, match=message):
        load(path)
