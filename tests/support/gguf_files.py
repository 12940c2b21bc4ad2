"""GGUF files of Llama models, written and quantized by the ``gguf`` package."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
Q8_0, Q5_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0
Q4_K, Q5_K, Q6_K = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q5_K", "Q6_K"))
F32 = gguf.GGMLQuantizationType.F32

# Where the blocks of types that the package cannot quantize have numbers of float16.
_HALVES = {
    gguf.GGMLQuantizationType.Q2_K: (80, 82),
    gguf.GGMLQuantizationType.Q3_K: (108,),
    Q4_K: (0, 2),
    Q5_K: (0, 2),
    Q6_K: (208,),
    gguf.GGMLQuantizationType.IQ4_NL: (0,),
    gguf.GGMLQuantizationType.IQ4_XS: (0,),
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def random_blocks(kind: Any, rows: int, inputs: int, seed: int = 0) -> Any:
    """Bytes [rows, bytes of a row] of blocks with any codes and small scales."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * inputs // block_size, block_bytes), np.uint8)
    for at in _HALVES[kind]:
        halves = generator.normal(0, 2e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: Any,
    kinds: Mapping[str, Any],
    *,
    tokenizer: bool = False,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """Write a Llama of transformers, and give the model what its quantized weights mean.

    Args:
        path: of the file.
        model: float32; weights of types that cannot be quantized here become random ones.
        kinds: of matrices, by a part of their name in the file; the first that matches counts.
        tokenizer: write that of the demo model, too.
        change: adds metadata or tensors.
        leave_out: names of tensors in the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        add_tokenizer(writer)
    if change is not None:
        change(writer)
    for name, weight, heads in _weights(model):
        if name in leave_out:
            continue
        kind = next((kinds[part] for part in kinds if part in name), F32)
        raw, values = _quantized(_paired(weight.numpy(), heads), kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        weight.copy_(torch.from_numpy(_apart(values, heads)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(model: Any) -> list[tuple[str, torch.Tensor, int | None]]:
    """Names in the file, weights, and the heads of those whose rows are reordered."""
    parameters = {name: each.data for name, each in model.named_parameters()}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if not model.config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(model.config.num_hidden_layers):
        for own, other in _LAYER.items():
            names[f"blk.{layer}.{own}.weight"] = f"model.layers.{layer}.{other}.weight"
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    return [
        (own, parameters[other], next((heads[part] for part in heads if part in own), None))
        for own, other in names.items()
    ]


def _quantized(weight: Any, kind: Any) -> tuple[Any, Any]:
    """The bytes, or numbers, of a weight, and what they mean as float32."""
    if kind == F32:
        return weight, weight
    if kind in _HALVES:
        raw = random_blocks(kind, weight.shape[0], weight.shape[1], seed=weight.size)
    else:
        raw = gguf.quantize(weight, kind)
    return raw, gguf.dequantize(raw, kind)


def _paired(weight: Any, heads: int | None) -> Any:
    """Rows as llama.cpp has them: the two inputs of a rotation side by side."""
    if heads is None:
        return np.ascontiguousarray(weight)
    split = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _apart(weight: Any, heads: int | None) -> Any:
    """Rows as transformers has them: the two inputs of a rotation half a head apart."""
    if heads is None:
        return weight
    split = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The demo model's tokenizer and chat template."""
    made = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    special = {each["id"] for each in made["added_tokens"]}
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([control if n in special else normal for n in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template((DEMO / "chat_template.jinja").read_text())
