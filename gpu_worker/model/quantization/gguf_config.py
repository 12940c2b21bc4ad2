"""Makes the configuration of a transformers model from the metadata of a GGUF file.

Names of keys are those of transformers' own table. What that table leaves out, although it changes
what the model computes, is set here, or refused.
"""

from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from gpu_worker.model.quantization.ggml_blocks import BLOCK_TYPES
from shared.errors import ModelUnsupported
from shared.gguf.header import GgufHeader

# Model types of transformers by architecture of llama.cpp, where both compute the same.
_MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "starcoder2": "starcoder2",
}
_MORE_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# The models of 27 B parameters scale queries by another size than that of a head; only the number
# of layers tells.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_F32, _F16 = 0, 1


def make_config(header: GgufHeader) -> Any:
    """The configuration of the model in a file.

    Raises:
        ModelUnsupported: names the key and the value that are not served.
    """
    architecture = header.architecture
    if architecture not in _MODEL_TYPES:
        served = ", ".join(_MODEL_TYPES)
        reason = f"general.architecture={architecture!r} is not served as GGUF; served are {served}"
        raise ModelUnsupported(f"{header.path}: {reason}")
    names = {key: name for key, name in GGUF_CONFIG_MAPPING[architecture].items() if name}
    fields: dict[str, Any] = {}
    for key, name in (names | _MORE_KEYS).items():
        value = header.of_model(key)
        if value is not None:
            fields[name] = value.tolist() if hasattr(value, "tolist") else value
    if not fields.get("sliding_window"):  # 0: there is no window
        fields.pop("sliding_window", None)
    _check(header, fields)
    fields.setdefault("vocab_size", len(header.metadata.get("tokenizer.ggml.tokens", ())))
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    fields |= _tokens(header)
    theta = fields.pop("rope_theta", 10_000.0)
    fields["rope_parameters"] = _rope(header, theta)
    if architecture in _LAYERS_OF_27B:
        fields["query_pre_attn_scalar"] = _query_size(architecture, fields)
    config = AutoConfig.for_model(_MODEL_TYPES[architecture], **fields)
    config.dtype = _dtype(header)
    return config


def _check(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Refuse what would be computed differently."""
    lists = [name for name, value in fields.items() if isinstance(value, list)]
    if lists:
        raise _refusal(header, lists[0], fields[lists[0]])
    for key in ("expert_count", "rope.scaling.attn_factor"):
        if header.of_model(key):
            raise _refusal(header, key, header.of_model(key))
    heads = fields.get("num_attention_heads", 0)
    if not heads or not fields.get("hidden_size"):
        raise ModelUnsupported(f"{header.path}: its metadata lack the sizes of the model")
    head_dim = fields.setdefault("head_dim", fields["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.of_model(key, head_dim) != head_dim:
            raise _refusal(header, key, header.of_model(key))


def _tokens(header: GgufHeader) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill texts."""
    ids = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    ends = list(dict.fromkeys(each for each in ids if each is not None))
    return {
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope(header: GgufHeader, theta: float) -> dict[str, Any]:
    """Parameters of the rotary embeddings."""
    kind = header.of_model("rope.scaling.type", "none")
    factor = header.of_model("rope.scaling.factor", header.of_model("rope.scale_linear"))
    if kind not in ("none", "linear") or (kind == "linear" and not factor):
        raise _refusal(header, "rope.scaling.type", kind)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if header.architecture != "gemma3":
        return rope
    local = header.of_model("rope.freq_base_swa", 10_000.0)
    return {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _query_size(architecture: str, fields: dict[str, Any]) -> int:
    """The number whose root divides queries times keys."""
    if fields["num_hidden_layers"] == _LAYERS_OF_27B[architecture]:
        return int(fields["hidden_size"] // fields["num_attention_heads"])
    return int(fields["head_dim"])


def _dtype(header: GgufHeader) -> torch.dtype:
    """bfloat16 for quantized files, else the type of their matrices."""
    kinds = {tensor.type_id for tensor in header.tensors.values()}
    if kinds <= {_F32}:
        return torch.float32
    if kinds <= {_F32, _F16} and not kinds & BLOCK_TYPES.keys():
        return torch.float16
    return torch.bfloat16


def _refusal(header: GgufHeader, key: str, value: object) -> ModelUnsupported:
    return ModelUnsupported(
        f"{header.path}: {header.architecture}.{key}={value!r} is not served as GGUF"
    )
