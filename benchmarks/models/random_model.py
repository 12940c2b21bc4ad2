"""Writes a folder with a model of Llama's shape, random weights and a small tokenizer.

    python -m benchmarks.models.random_model FOLDER [--shape 162m] [--dtype bfloat16] [--seed 0]

The speed of a server does not depend on what a model has learned. Every server that reads
transformers' folders can load this one; the same seed gives the same weights.
"""

import argparse
import itertools
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_BOS, _EOS = "<|bos|>", "<|eos|>"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tokens beyond the bytes are runs of these letters. So the text of a random model can be shown
# token by token, without halves of characters that a server has to hold back.
_LETTERS = string.ascii_letters + string.digits
# A template without words of its own: a chat is as long as its messages.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 32_000
    context: int = 4_096  # tokens

    def as_llama(self) -> dict[str, Any]:
        """Fields for transformers' configuration of a Llama."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "bos_token_id": 0,
            "eos_token_id": None,  # generation always runs to its length
            "pad_token_id": None,
            "tie_word_embeddings": False,
        }


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, vocabulary=1_024),
    # In float32, 16 tokens are a page of 2 MiB: a block of virtual memory on a GPU is whole pages.
    "paged": Shape(2_048, 16, 16, 8, 1_024, vocabulary=1_024),
    "162m": Shape(768, 12, 12, 12, 3_072),
    "smollm2": Shape(576, 30, 9, 3, 1_536, vocabulary=49_152, context=8_192),
    "1b": Shape(2_048, 16, 32, 8, 8_192),
    "8b": Shape(4_096, 32, 32, 8, 14_336),
}


def write_model(folder: Path, shape: Shape, dtype: torch.dtype, seed: int) -> int:
    """Write configuration, weights and tokenizer; the number of parameters.

    Args:
        folder: created if missing; files of the same names are replaced.
    """
    config = transformers.LlamaConfig(**shape.as_llama(), dtype=dtype)
    transformers.set_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder, shape)
    return sum(weight.numel() for weight in model.parameters())


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    tokenizer = make_tokenizer(shape.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def make_tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE with ``size`` tokens: two special ones, all bytes, and runs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [_BOS, _EOS, *alphabet]
    if size < len(names):
        raise ValueError(f"size={size}: at least {len(names)} tokens are needed for all bytes")
    merges: list[tuple[str, str]] = []
    pairs = [first + second for first, second in itertools.product(_LETTERS, repeat=2)]
    runs = itertools.chain(
        itertools.product(_LETTERS, repeat=2),
        itertools.product(pairs, _LETTERS),
    )
    for left, right in itertools.islice(runs, size - len(names)):
        merges.append((left, right))
        names.append(left + right)
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (_BOS, _EOS)])
    return tokenizer


def main() -> None:
    """Write the folder and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model is to lie")
    parser.add_argument("--shape", choices=SHAPES, default="162m", help="sizes of the model")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="type of the weights")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    parameters = write_model(args.folder, shape, _DTYPES[args.dtype], args.seed)
    print(f"{args.folder}: {parameters / 1e6:.0f} M parameters, {args.dtype}, {shape}")


if __name__ == "__main__":
    main()
