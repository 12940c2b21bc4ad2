"""Incremental detokenization: tokens to text, one token at a time.

The text after a position is a pure function of the tokens up to it, however they are grouped. All
pieces together are exactly what the tokenizer decodes from all tokens at once, without special
tokens. No piece ends inside a character. Work per token is bounded.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens that WindowDetokenizer decodes again. A character has at most four bytes.
_CONTEXT_TOKENS = 6
_MAX_PENDING_TOKENS = 16


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token: int) -> str:
        """The text that this token completes, "" if none."""

    def finish(self) -> str:
        """The text that was held back, damaged characters replaced. No push may follow."""


class ByteLevelDetokenizer:
    """Byte-level BPE: every token is a run of bytes, and the text is their UTF-8.

    Args:
        token_bytes: bytes of a token, none for special ones.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """SentencePiece: every token is a piece of text, or a byte of what no piece spells.

    The tokenizer decodes a whole run of byte tokens at once: if any byte of it is damaged, all are
    replaced. So a run is held back until it ends.

    Args:
        piece: text of a token, a byte (int) for byte tokens, None for special ones.
        strip: spaces to drop at the beginning of the text.
    """

    def __init__(self, piece: Callable[[int], str | int | None], strip: int) -> None:
        self._piece = piece
        self._strip = strip
        self._run = bytearray()

    def push(self, token: int) -> str:
        piece = self._piece(token)
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._stripped(self._end_run() + piece)

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDetokenizer:
    """Any tokenizer: decodes each new token in a short window of earlier ones.

    Exact if the text of a token depends on few tokens before it. It is used only where neither of
    the exact detokenizers applies.

    Args:
        decode: text of a run of tokens, special ones left out.
        context: the tokens before the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._done = list(context[-_CONTEXT_TOKENS:])
        self._pending: list[int] = []
        self._before = decode(self._done) if self._done else ""

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._text()
        held = text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING_TOKENS
        if held or not text:
            self._limit()
            return ""
        self._accept()
        return text

    def finish(self) -> str:
        text = self._text() if self._pending else ""
        self._pending.clear()
        return text

    def _text(self) -> str:
        return self._decode(self._done + self._pending)[len(self._before) :]

    def _limit(self) -> None:
        """Limit the window in a run of tokens without text."""
        if len(self._pending) >= 4 * _MAX_PENDING_TOKENS:
            self._accept()

    def _accept(self) -> None:
        kept = self._done + self._pending
        for start in range(max(0, len(kept) - _CONTEXT_TOKENS), -1, -1):
            self._before = self._decode(kept[start:])
            # A window that begins the text, or one whose beginning shows, keeps its spaces.
            if self._before and not self._before.startswith(_REPLACEMENT):
                break
            if len(kept) - start >= 2 * _CONTEXT_TOKENS:
                break
        self._done = kept[start:]
        self._pending.clear()


class MarkerDetokenizer:
    """Another detokenizer, with the names of some special tokens in the text.

    Args:
        new: a detokenizer for text that continues these tokens.
        names: of the special tokens that are shown.
        context: the tokens before the text.
    """

    def __init__(
        self,
        new: Callable[[Sequence[int]], Detokenizer],
        names: Mapping[int, str],
        context: Sequence[int],
    ) -> None:
        self._new = new
        self._names = names
        self._inner = new(context)

    def push(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            return self._inner.push(token)
        text = self._inner.finish() + name
        self._inner = self._new(())
        return text

    def finish(self) -> str:
        return self._inner.finish()
