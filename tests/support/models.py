"""Tiny random models of many families: real architectures, weights from a fixed seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 4096  # the demo model's tokenizer fits
EOS_TOKEN_ID = 2
MAX_MODEL_LEN = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    # Large weights: attention must matter, so that a wrong mask shows in the logits.
    "initializer_range": 0.3,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
}
# For configurations that derive it from these.
_OWN_HEAD_DIM = {key: value for key, value in _LLAMA.items() if key != "head_dim"}


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**_LLAMA)


def _opt() -> PretrainedConfig:
    return transformers.OPTConfig(
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        init_std=0.3,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
    )


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        **_COMMON, n_embd=64, n_inner=96, n_layer=2, n_head=4, n_positions=MAX_MODEL_LEN
    )


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_LLAMA)


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(
        **_LLAMA,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,  # tied, a random one repeats its last token for ever
    )


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **{**_LLAMA, "num_hidden_layers": 3},
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    )


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_LLAMA, sliding_window=24)


def _phimoe() -> PretrainedConfig:
    return transformers.PhimoeConfig(
        **_OWN_HEAD_DIM,
        num_local_experts=4,
        sliding_window=None,
    )


def _qwen2_moe() -> PretrainedConfig:
    return transformers.Qwen2MoeConfig(
        **_OWN_HEAD_DIM,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    )


def _phi3() -> PretrainedConfig:
    return transformers.Phi3Config(
        **_OWN_HEAD_DIM,
        partial_rotary_factor=0.5,
    )


def _gpt_neox() -> PretrainedConfig:
    return transformers.GPTNeoXConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
    )


def _bloom() -> PretrainedConfig:
    return transformers.BloomConfig(**_COMMON, hidden_size=64, n_layer=2, n_head=4)


def _mpt() -> PretrainedConfig:
    return transformers.MptConfig(
        vocab_size=VOCAB_SIZE, d_model=64, n_heads=4, n_layers=2, max_seq_len=MAX_MODEL_LEN
    )


def _granite_hybrid() -> PretrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **_OWN_HEAD_DIM,
        num_local_experts=0,
        shared_intermediate_size=96,
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
        mamba_n_heads=8,
    )


def _hunyuan_moe() -> PretrainedConfig:
    return transformers.HunYuanMoEV1Config(**_LLAMA, num_experts=4, moe_topk=2)


def _xmod() -> PretrainedConfig:
    return transformers.XmodConfig(
        **_COMMON,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        languages=("en_XX", "de_DE"),
        is_decoder=True,
    )


def _llama4() -> PretrainedConfig:
    return transformers.Llama4TextConfig(
        **_LLAMA,
        intermediate_size_mlp=96,
        num_local_experts=4,
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[1, 1],
    )


def _falcon() -> PretrainedConfig:
    return transformers.FalconConfig(
        **_COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )


def _mamba() -> PretrainedConfig:
    return transformers.MambaConfig(**_COMMON, hidden_size=64, num_hidden_layers=2, state_size=8)


def _t5() -> PretrainedConfig:
    return transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4
    )


SERVED = ("llama", "opt", "gpt2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt_neox")
"""Kinds that the worker serves."""

_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "opt": _opt,
    "gpt2": _gpt2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "granitemoehybrid": _granite_hybrid,
    "hunyuan_v1_moe": _hunyuan_moe,
    "mpt": _mpt,
    "xmod": _xmod,
    "llama4_text": _llama4,
    "falcon": _falcon,
    "mamba": _mamba,
    "t5": _t5,
}


def tiny_model(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random float32 model of a family below ``folder``; its path.

    Args:
        kind: one of ``SERVED``, or another with a configuration here.
        changes: attributes of the configuration to set before the model is built.
    """
    config = _CONFIGS[kind]()
    for key, value in changes.items():
        setattr(config, key, value)
    path = folder / kind
    _build(config).save_pretrained(path)
    return path


def _build(config: PretrainedConfig) -> PreTrainedModel:
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240607)
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    return model.eval()
