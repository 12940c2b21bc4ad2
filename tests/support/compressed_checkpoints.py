"""Checkpoints of compressed-tensors, made by that library from a saved model."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

W8A8: dict[str, Any] = {"weights": {"num_bits": 8, "strategy": "channel"}, "inputs": True}
W8A16 = {"weights": {"num_bits": 8, "strategy": "channel"}, "inputs": False}
W4A16: dict[str, Any] = {
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "inputs": False,
}
W4A16_ASYMMETRIC = {"weights": W4A16["weights"] | {"symmetric": False}, "inputs": False}
"""Schemes by their usual names."""


def scheme_config(scheme: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` for all linear layers but the output layer."""
    inputs = {"num_bits": 8, "dynamic": True, "strategy": "token"} if scheme["inputs"] else None
    group = {"targets": ["Linear"], "weights": scheme["weights"], "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme["inputs"] else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compress(model_path: Path, folder: Path, scheme: dict[str, Any]) -> Path:
    """Save a compressed copy of a model, with scales from the extremes of each group.

    ``folder/dequantized`` is the same model with the weights that the library decompresses.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    parsed = QuantizationConfig.model_validate(scheme_config(scheme))
    group = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        size = group.weights.group_size or module.in_features
        low, high = module.weight.detach().reshape(len(module.weight), -1, size).aminmax(dim=2)
        scale, zero = calculate_qparams(low, high, group.weights)
        local = {"weight": tensors.pop(f"{name}.weight"), "weight_scale": scale}
        local["weight_zero_point"] = zero.round().to(torch.int8)
        compressed = compressor.compress(local, group)
        tensors |= {f"{name}.{key}": each.contiguous() for key, each in compressed.items()}
        decompressed = compressor.decompress(compressed, group)
        module.weight.data.copy_(decompressed["weight"])
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    model.save_pretrained(folder / "dequantized")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model_path / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": scheme_config(scheme)})
    )
    return folder
