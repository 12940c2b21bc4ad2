"""Checkpoints of GPTQ and AWQ, packed here bit by bit as these projects describe it."""

import json
import shutil
from collections.abc import Iterator
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
from shared.errors import ModelUnsupported
from tests.gpu_worker.conftest import ModelPath, prompt

CPU = torch.device("cpu")
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
Tensors = dict[str, torch.Tensor]


def words(codes: Iterator[int], bits: int) -> int:
    """A word as a signed number; the first code is in its lowest bits."""
    found = sum(code << (bits * place) for place, code in enumerate(codes))
    return found - 2**32 if found >= 2**31 else found


def packed(codes: list[list[int]], bits: int, order: list[int]) -> torch.Tensor:
    """Words [rows, columns * bits / 32] of consecutive codes of a row."""
    each = 32 // bits
    return torch.tensor(
        [
            [words((row[at + place] for place in order), bits) for at in range(0, len(row), each)]
            for row in codes
        ],
        dtype=torch.int32,
    )


def made(weight: torch.Tensor, bits: int, kind: str, v2: bool = False) -> tuple[Tensors, Any]:
    """Random codes for a weight [N, K], packed; and the numbers [N, K] that they mean."""
    outputs, inputs = weight.shape
    num_groups, most = inputs // GROUP, 2**bits - 1
    codes = torch.randint(0, most + 1, (outputs, inputs))
    # The first version of GPTQ cannot store a zero point of 0.
    zeros = torch.randint(1, most + 1, (outputs, num_groups))
    scales = (torch.rand(outputs, num_groups) * 0.02 + 0.01).half()
    of_input = torch.arange(inputs) // GROUP
    values = scales.float()[:, of_input] * (codes - zeros[:, of_input])
    if kind == "awq":
        qweight = packed(codes.T.tolist(), 4, AWQ_ORDER)  # [K, N / 8]
        qzeros = packed(zeros.T.tolist(), 4, AWQ_ORDER)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}, values
    order = list(range(32 // bits))
    qweight = packed(codes.tolist(), bits, order).T.contiguous()  # [K / codes, N]
    qzeros = packed((zeros - (0 if v2 else 1)).T.tolist(), bits, order)
    found = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}
    return found | {"g_idx": of_input.int()}, values


def checkpoint(model_path: Path, folder: Path, config: dict[str, Any]) -> tuple[Path, Any]:
    """A quantized copy of a model; and a model of transformers with the same weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tensors = dict(model.state_dict())
    v2 = config.get("checkpoint_format") == "gptq_v2"
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            found, values = made(module.weight, config["bits"], config["quant_method"], v2)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{key}": each for key, each in found.items()}
            module.weight.data.copy_(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((model_path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"quantization_config": config}))
    return folder, model


def load(path: Path) -> RaggedModel:
    return load_model(WorkerSettings(model=str(path), dtype="float32"), CPU)


@pytest.mark.parametrize(
    "config",
    [GPTQ, GPTQ | {"bits": 8}, GPTQ | {"checkpoint_format": "gptq_v2"}, AWQ],
    ids=["gptq", "gptq in 8 bits", "gptq_v2", "awq"],
)
def test_logits_are_those_of_the_dequantized_weights(
    config: dict[str, Any], model_path: ModelPath, tmp_path: Path
) -> None:
    path, expected = checkpoint(model_path("llama"), tmp_path, config)
    found = load(path)
    for name, module in found.model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = expected.get_parameter(f"{name}.weight")
            torch.testing.assert_close(module.quantized.dequantize(), weight, rtol=1e-6, atol=1e-6)
    tokens = torch.tensor(prompt(20))
    with torch.inference_mode():
        logits = expected(tokens.unsqueeze(0)).logits[0]
        torch.testing.assert_close(found.eager_logits(tokens), logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPTQ, {"bits": 3}, r"quantization_config\.bits=3 is not served"),
        (GPTQ, {"dynamic": {"-:.*": {}}}, r"quantization_config\.dynamic="),
        (GPTQ, {"checkpoint_format": "marlin"}, r"checkpoint_format='marlin' is not served"),
        (GPTQ, {"group_size": 48}, "64 inputs and 64 outputs in groups of 48"),
        (AWQ, {"version": "gemv"}, r"quantization_config\.version='gemv' is not served"),
        (AWQ, {"bits": 8}, r"quantization_config\.bits=8 is not served"),
    ],
)
def test_what_is_not_served_is_named(
    config: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    model_path: ModelPath,
    tmp_path: Path,
) -> None:
    shutil.copy(model_path("llama") / "model.safetensors", tmp_path)
    own = json.loads((model_path("llama") / "config.json").read_text())
    own["quantization_config"] = config | changes
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(ModelUnsupported, match=message):
        load(tmp_path)


def test_inputs_ordered_by_activation_are_refused(model_path: ModelPath, tmp_path: Path) -> None:
    path, _ = checkpoint(model_path("llama"), tmp_path, GPTQ)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"layers\.1\.mlp\.down_proj: g_idx orders inputs"):
        load(path)
