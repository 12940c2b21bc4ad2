"""How long a text may be, known before it is tokenized."""

import json
from dataclasses import dataclass
from typing import Any

from gateway.text.vocabulary import byte_alphabet, decoder_steps

# A character in composed form is at most so many in decomposed form (Unicode, UAX #15).
_COMPOSED_CHARS = {"NFC": 4}
_CONTINUATION_BYTES = range(0x80, 0xC0)  # of UTF-8
_KEEPING_SPLITS = ("ByteLevel", "Metaspace", "Digits")


@dataclass(frozen=True, slots=True)
class TextBound:
    """The least number of tokens that a text becomes.

    Attributes:
        chars_per_token: characters that one token stands for at most.
        dropped: characters for which the vocabulary has no token, and which vanish.
    """

    chars_per_token: int
    dropped: str

    def min_tokens(self, text: str) -> int:
        """Tokens of a text, at least."""
        counted = len(text) - sum(map(text.count, self.dropped))
        return counted // self.chars_per_token


def text_bound(backend: Any) -> TextBound | None:
    """How long texts of so many tokens can be; None if that is not bounded.

    It is bounded where no text is dropped on the way to tokens and no unknown run of text becomes
    one token: byte-level vocabularies and those with a token for each byte, without normalizers
    and pre-tokenizers that remove anything.

    Args:
        backend: a ``tokenizers.Tokenizer``, or None where there is none.
    """
    if backend is None:
        return None
    composed = _chars_after_normalizer(backend.normalizer)
    added = backend.get_added_tokens_decoder().values()
    # Such tokens take any amount of space beside them.
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
    # A longer character keeps its continuation bytes, whichever byte it begins with.
    dropped = "".join(chr(byte) for byte in missing if byte < _CONTINUATION_BYTES.start)
    # A name in either spelling has no fewer characters than the text that it stands for.
    return TextBound(composed * max(map(len, names)), dropped)


def _chars_after_normalizer(normalizer: Any) -> int | None:
    """Characters that become one at most; None if some may vanish."""
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
