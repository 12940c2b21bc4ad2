"""``--quantization``: any model's linear layers in few bits, and back."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gpu_worker.model.check.load_check import ModelCheck
from gpu_worker.model.loader import load_model
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.quantization.requested_format import apply_quantization, check_device
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import attention_layers
from gpu_worker.step.executor import Executor
from kernels.cpu.quantized.quantized_packing import multiplies_bytes
from kernels.cpu.runtime.instruction_set import best_dot, detect
from shared.errors import ModelUnsupported, SettingsError
from shared.metrics import WorkerMetrics
from tests.gpu_worker.conftest import MakeWorker, ModelPath, prompt
from tests.gpu_worker.planner import Planner

CPU = torch.device("cpu")
_TIED = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def load(path: Path, quantization: str | None = None) -> Any:
    settings = WorkerSettings(model=str(path), quantization=quantization, dtype="float32")
    return load_model(settings, CPU).model


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


@pytest.mark.parametrize(("kind", "num_layers"), [("llama", 15), ("gpt2", 9), ("opt", 13)])
def test_linear_layers_of_decoder_layers_and_the_output_layer_are_quantized(
    kind: str, num_layers: int, model_path: ModelPath
) -> None:
    found = quantized_layers(load(model_path(kind), "int4"))
    assert len(found) == num_layers
    bits = {name.rpartition(".")[2]: layer.quantized.bits for name, layer in found.items()}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}


def test_weights_stay_near_and_embeddings_as_they_were(model_path: ModelPath) -> None:
    own, quantized = load(model_path("llama")), load(model_path("llama"), "int8")
    for name, layer in quantized_layers(quantized).items():
        weight = own.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        error = (layer.quantized.dequantize() - weight).norm() / weight.norm()
        assert 0 < error < 0.01
    embeddings = (each.get_input_embeddings().weight for each in (own, quantized))
    assert torch.equal(*embeddings)


def test_a_quantized_model_is_not_quantized_again_but_dequantized(model_path: ModelPath) -> None:
    model = load(model_path("llama"), "int4")
    expected = quantized_layers(model)["model.layers.0.mlp.down_proj"].quantized.dequantize()
    with pytest.raises(SettingsError, match=r"--quantization.*int4 already"):
        apply_quantization(model, "int8")
    assert apply_quantization(model, None) == "int4"
    assert apply_quantization(model, "none") == "none"
    assert not quantized_layers(model)
    assert torch.equal(model.get_submodule("model.layers.0.mlp.down_proj").weight, expected)


def test_quantization_is_refused_where_it_would_be_slower() -> None:
    check_device("int4", CPU)
    check_device(None, torch.device("cuda", 0))
    with pytest.raises(SettingsError, match=r"--quantization.*not on cuda:0"):
        check_device("int8", torch.device("cuda", 0))


def test_memory_and_parameters_are_those_of_the_quantized_model(model_path: ModelPath) -> None:
    wide, narrow = (
        load_model(WorkerSettings(model=str(model_path("llama")), quantization=form), CPU)
        for form in (None, "int4")
    )
    assert narrow.num_parameters == wide.num_parameters
    assert narrow.weight_bytes < 0.75 * wide.weight_bytes
    assert narrow.weight_format == "int4"


def test_an_output_layer_that_shares_the_embedding_counts_once() -> None:
    config = transformers.LlamaConfig(**_TIED, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    own = RaggedModel(model).num_parameters
    assert RaggedModel(model, apply_quantization(model, "int8")).num_parameters == own


def test_metrics_name_the_format_and_the_kernels(make_worker: MakeWorker) -> None:
    worker = make_worker("llama", quantization="int4", dtype="bfloat16")
    assert worker.kernels["weights"] == "int4"
    instructions = detect()
    products = "bfloat16" if instructions is None else "float32"
    if instructions is not None and multiplies_bytes(torch.bfloat16, instructions):
        products = "int8"
    assert worker.kernels["products"] == products
    metrics = WorkerMetrics("m", "e")
    metrics.describe_weights(worker.kernels, 100)
    [line] = re.findall("pagestream:worker_weights{.*", metrics.render().decode())
    for name, value in worker.kernels.items():
        assert f'{name}="{value}"' in line
    assert line.endswith(" 1.0")


@pytest.mark.skipif(detect() is None, reason="this CPU is not served")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_tokens_are_those_of_the_dequantized_model(
    form: str, make_worker: MakeWorker, model_path: ModelPath, tmp_path: Path
) -> None:
    dequantized = load(model_path("llama"), form)
    apply_quantization(dequantized, "none")
    dequantized.set_attn_implementation("eager")
    dequantized.save_pretrained(tmp_path)
    expected, found = (
        make_worker("llama", **settings)
        for settings in ({"model": str(tmp_path)}, {"quantization": form})
    )
    assert (expected.model.weights, found.model.weights) == ("none", form)
    tokens = [greedy(worker.executor) for worker in (expected, found)]
    assert tokens[0] == tokens[1]


def greedy(executor: Executor) -> list[list[int]]:
    """Tokens of two sequences of unlike lengths, the second of which is admitted later."""
    planner = Planner(executor)
    found = []
    for handle, length in ((1, 50), (2, 17)):
        planner.admit(handle, prompt(length, handle))
        planner.step(**{f"s{handle}": length - 1})
        planner.step(**{f"s{handle}": 1})
        found.append(planner.run(handle, 24)[:24])
    return found


@pytest.mark.skipif(not best_dot().of_pairs, reason="only pairs of bfloat16 have equal bits")
def test_a_recomputed_sequence_in_bfloat16_has_the_tokens_of_its_decodes(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker("llama", quantization="int4", dtype="bfloat16")
    planner = Planner(worker.executor)
    planner.admit(1, prompt(40, 1))
    planner.step(s1=40)
    tokens = planner.run(1, 30)[:30]
    for cut in (7, 20):
        worker.executor.reset()
        planner = Planner(worker.executor)
        planner.admit(1, prompt(40, 1) + tokens[:cut])
        planner.step(s1=40 + cut)
        assert planner.run(1, 30 - cut)[: 30 - cut] == tokens[cut:]


def test_the_check_at_load_compares_with_the_dequantized_model(model_path: ModelPath) -> None:
    settings = WorkerSettings(model=str(model_path("llama")), quantization="int4")
    model = load_model(settings, CPU)
    check = ModelCheck(model, attention_layers(model), 512)
    assert check.layers("").error < 1e-5
    layer = quantized_layers(model.model)["model.layers.1.mlp.up_proj"]
    layer.scales *= 1.05
    with pytest.raises(ModelUnsupported, match="decoder layer 1"):
        check.layers("")
