"""Bounds on the number of tokens of a text, computed without tokenizing it."""

import json
from dataclasses import dataclass
from typing import Any

from gateway.text.vocabulary import byte_alphabet, decoder_steps

# The most characters in decomposed form that become one composed character (Unicode, UAX #15).
_COMPOSED_CHARS = {"NFC": 4}
_CONTINUATION_BYTES = range(0x80, 0xC0)  # of UTF-8
_KEEPING_SPLITS = ("ByteLevel", "Metaspace", "Digits")


@dataclass(frozen=True, slots=True)
class TextBound:
    """A lower bound of the number of tokens of a text.

    Attributes:
        chars_per_token: the most characters that one token may cover.
        dropped: characters without a token in the vocabulary, which the tokenizer drops.
    """

    chars_per_token: int
    dropped: str

    def min_tokens(self, text: str) -> int:
        """The least number of tokens that a text may have."""
        counted = len(text) - sum(map(text.count, self.dropped))
        return counted // self.chars_per_token


def text_bound(backend: Any) -> TextBound | None:
    """The bound of a tokenizer; None if it has none.

    There is one if no text is dropped and no run of unknown text becomes one token. That holds for
    byte-level vocabularies and those with a token for each byte, if no normalizer or pre-tokenizer
    removes text.

    Args:
        backend: a ``tokenizers.Tokenizer``, or None where there is none.
    """
    if backend is None:
        return None
    composed = _chars_after_normalizer(backend.normalizer)
    added = backend.get_added_tokens_decoder().values()
    # Such a token covers any number of spaces beside it.
    takes_spaces = any(token.lstrip or token.rstrip for token in added)
    if composed is None or takes_spaces or not _keeps_all(backend.pre_tokenizer):
        return None
    names = backend.get_vocab(with_added_tokens=True)
    if [step["type"] for step in decoder_steps(backend.decoder)] == ["ByteLevel"]:
        spelled = {byte: char for char, byte in byte_alphabet()}
    elif not getattr(backend.model, "byte_fallback", False):
        return None
    else:
        spelled = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    missing = [byte for byte in range(256) if spelled[byte] not in names]
    if any(byte in _CONTINUATION_BYTES for byte in missing):
        return None
    # A multi-byte character keeps its continuation bytes, whatever its first byte.
    dropped = "".join(chr(byte) for byte in missing if byte < _CONTINUATION_BYTES.start)
    # In both spellings a name has at least as many characters as its text.
    return TextBound(composed * max(map(len, names)), dropped)


def _chars_after_normalizer(normalizer: Any) -> int | None:
    """The most characters that normalizers merge into one; None if they may drop some."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind in _COMPOSED_CHARS:
            most *= _COMPOSED_CHARS[kind]
        elif kind == "Replace":
            old = step["pattern"].get("String")
            if old is None or len(step["content"]) < len(old):
                return None
        elif kind != "Prepend":
            return None
    return most


def _keeps_all(pre_tokenizer: Any) -> bool:
    for step in _steps(pre_tokenizer, "pretokenizers"):
        kind = step["type"]
        splits = kind in ("Split", "Punctuation") and step["behavior"] != "Removed"
        if kind not in _KEEPING_SPLITS and not splits:
            return False
    return True


def _steps(stage: Any, parts: str) -> list[dict[str, Any]]:
    if stage is None:
        return []
    state = json.loads(stage.__getstate__())
    steps: list[dict[str, Any]] = state[parts] if state["type"] == "Sequence" else [state]
    return steps
