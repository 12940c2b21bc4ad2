"""Maps token ids to bytes or text."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

from gateway.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
)

Decode = Callable[[Sequence[int]], str]
"""Text of tokens, special ones left out."""

_CHECKED_IDS = 4096
_CHECKED_RUN = 64


class Vocabulary(Protocol):
    """Turns the tokens of one tokenizer into text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself; of a special token, its name."""

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A detokenizer for text that continues ``context``; () for text of its own."""


class ByteLevelVocabulary:
    """Tokens are runs of bytes, written in GPT-2's alphabet of printable characters."""

    def __init__(self, name_of: Callable[[int], str | None], special: frozenset[int]) -> None:
        alphabet = dict(byte_alphabet())

        def spelled(token: int) -> bytes:
            name = name_of(token) or ""
            try:
                return bytes(alphabet[char] for char in name)
            except KeyError:  # an added token, which is plain text
                return name.encode()

        self.token_bytes = cache(spelled)
        self._shown = cache(lambda token: b"" if token in special else spelled(token))

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:  # noqa: ARG002
        return ByteLevelDetokenizer(self._shown)


class PieceVocabulary:
    """Tokens are pieces of text, and one token for each byte for text that no piece covers."""

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        special: frozenset[int],
        replacements: Sequence[tuple[str, str]],
        strip: int,
    ) -> None:
        def read(token: int) -> str | int:
            name = name_of(token) or ""
            for old, new in replacements:
                name = name.replace(old, new)
            byte = _byte_token(name)
            return name if byte is None else byte

        self._read = cache(read)
        self._piece = cache(
            lambda token: None if token in special or name_of(token) is None else read(token)
        )
        self._strip = strip

    def token_bytes(self, token: int) -> bytes:
        piece = self._read(token)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        begun = any(self._piece(token) not in (None, "") for token in context)
        return PieceDetokenizer(self._piece, 0 if begun else self._strip)


class OpaqueVocabulary:
    """Tokens of any tokenizer, by its own ``decode``."""

    def __init__(self, decode: Decode, decode_special: Decode) -> None:
        self._decode = decode
        self._decode_special = decode_special

    def token_bytes(self, token: int) -> bytes:
        return self._decode_special([token]).encode()

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        return WindowDetokenizer(self._decode, context)


def vocabulary_of(backend: Any, decode: Decode, decode_special: Decode) -> Vocabulary:
    """The exact vocabulary of a tokenizer if it decodes as the tokenizer does, else an opaque one.

    Args:
        backend: a ``tokenizers.Tokenizer``, or None where there is none.
    """
    opaque = OpaqueVocabulary(decode, decode_special)
    if backend is None:
        return opaque
    exact = _exact_vocabulary(backend)
    if exact is None or not _decodes_alike(exact, decode, backend.get_vocab_size()):
        return opaque
    return exact


def _exact_vocabulary(backend: Any) -> Vocabulary | None:
    steps = decoder_steps(backend.decoder)
    kinds = [step["type"] for step in steps]
    added = backend.get_added_tokens_decoder()
    special = frozenset(token for token, info in added.items() if info.special)
    if kinds == ["ByteLevel"]:
        return ByteLevelVocabulary(backend.id_to_token, special)
    replacing = [step for step in steps if step["type"] == "Replace"]
    rest = steps[len(replacing) :]
    if [step["type"] for step in rest] not in (
        ["ByteFallback", "Fuse"],
        ["ByteFallback", "Fuse", "Strip"],
    ):
        return None
    strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    strip = rest[2] if len(rest) == 3 else strip
    patterns = [(step["pattern"].get("String"), step["content"]) for step in replacing]
    if strip["content"] != " " or strip["stop"] or any(not old for old, _ in patterns):
        return None
    return PieceVocabulary(backend.id_to_token, special, patterns, strip["start"])


def decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a ``tokenizers`` decoder, as their JSON states."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _decodes_alike(vocabulary: Vocabulary, decode: Decode, size: int) -> bool:
    """Compare both on tokens from the whole vocabulary, in an order that no text has."""
    stride = max(1, size // _CHECKED_IDS)
    tokens = [token * 7919 % size for token in range(0, size, stride)]
    for start in range(0, len(tokens), _CHECKED_RUN):
        run = tokens[start : start + _CHECKED_RUN]
        detokenizer = vocabulary.detokenizer(())
        text = "".join(map(detokenizer.push, run)) + detokenizer.finish()
        if text != decode(run):
            return False
    return True


def byte_alphabet() -> Iterator[tuple[str, int]]:
    """GPT-2's characters for bytes: printable ones are themselves, others follow from U+0100."""
    shifted = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte), byte
        else:
            yield chr(256 + shifted), byte
            shifted += 1


def _byte_token(name: str) -> int | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None
