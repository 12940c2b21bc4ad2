"""Tiny tokenizers of the families that models come with."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EURO_BYTES = ["<0xE2>", "<0x82>", "<0xAC>"]
_WORDS = ["▁", "▁Hello", "▁world", "Hello", "wor", "ld", "!", "▁▁", "é", "日本", "▁a", "b"]
_SPECIAL = ["<s>", "</s>", "<unk>"]


def _wrapped(backend: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _special() -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in _SPECIAL]


def byte_level() -> Any:
    """GPT-2, Llama 3, Qwen: each byte a character of the alphabet, some of them joined."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = ["Ġa", "Ġw", "ð\u0178", "Ģâ", "ĥ¬", "ab"]
    vocab = {name: index for index, name in enumerate([*_SPECIAL, *alphabet, *joined])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_special())
    backend.add_tokens(["<added token>", "ü plain"])
    return _wrapped(backend)


def sentencepiece(strip: bool = True) -> Any:
    """Llama 2 and Gemma: pieces with ▁ for spaces, and a token for each byte."""
    names = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    vocab = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(_special())
    backend.add_tokens(["<added>"])
    return _wrapped(backend)


def metaspace() -> Any:
    """T5, XLM: pieces with ▁ for spaces, without bytes."""
    names = [*_SPECIAL, *_WORDS]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(_special())
    return _wrapped(backend)


FAMILIES = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without strip": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
}
