"""Ids of Server-Sent Events: the position of a stream's reader, where any gateway can continue.

An id holds, for every choice, the number of tokens that the reader has and their checksum, and
whether the choice has begun and ended. No more is needed, since text after a position is a pure
function of the tokens up to it. The checksum shows whether the log holds the same tokens: an engine
that lost them may have sampled others.

    12b8d1f9c07..4e00aa31c5~32      choice 0 has 12 tokens, 1 has not begun, 2 ended with 4;
                                    32 prompt tokens came from the cache
    ...~32u                         the usage was shown, too
    ...~32d                         nothing is left
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.http.errors import invalid
from gateway.openai.responses.serializer import StreamEvent
from gateway.text.choice_text import Delta

_CHOICE = r"(?:[0-9]{1,9}[be][0-9a-f]{8})?"
_ID = re.compile(rf"({_CHOICE}(?:\.{_CHOICE})*)~([0-9]{{1,12}})([ud]?)")
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Position:
    """How much of one choice the reader of a stream has."""

    num_tokens: int = 0
    checksum: int = 0
    begun: bool = False
    ended: bool = False

    def after(self, tokens: Sequence[int]) -> "Position":
        """The position after more tokens."""
        checksum = zlib.crc32(np.asarray(tokens, "<i4").tobytes(), self.checksum)
        return Position(self.num_tokens + len(tokens), checksum, True, self.ended)

    def __str__(self) -> str:
        if not self.begun:
            return ""
        return f"{self.num_tokens}{'e' if self.ended else 'b'}{self.checksum:08x}"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How much of a stream its reader has.

    Attributes:
        choices: by index; empty if it has nothing.
        cached_tokens: of the prompts, as counted so far.
        has_usage: the reader has the usage.
        is_done: the reader has all of it.
    """

    choices: tuple[Position, ...] = ()
    cached_tokens: int = 0
    has_usage: bool = False
    is_done: bool = False

    @staticmethod
    def parse(text: str | None) -> "StreamPosition":
        """Parses the id of the last event that the reader has; None: it has none.

        Raises:
            ApiError: 400.
        """
        if not text:
            return StreamPosition()
        found = _ID.fullmatch(text)
        if found is None:
            shown = repr(text[:_SHOWN_CHARS])
            raise invalid("Last-Event-ID", f"Last-Event-ID={shown}: no event has this id")
        choices = tuple(_parse_choice(part) for part in found[1].split("."))
        return StreamPosition(choices, int(found[2]), bool(found[3]), found[3] == "d")


def _parse_choice(text: str) -> Position:
    if not text:
        return Position()
    num_tokens, mark, checksum = text[:-9], text[-9], text[-8:]
    return Position(int(num_tokens), int(checksum, 16), True, mark == "e")


class EventIds:
    """Gives ids to the events of one stream.

    Args:
        start: what the reader has before the first event.
    """

    def __init__(self, num_choices: int, start: StreamPosition) -> None:
        self._choices = list(start.choices) or [Position()] * num_choices
        self._parts = [str(choice) for choice in self._choices]

    def chunk(
        self, index: int, delta: Delta, events: Sequence[StreamEvent], cached_tokens: int
    ) -> bytes:
        """The events of a delta with their ids."""
        before, named = self._choices[index], []
        after = before.after(delta.token_ids)
        for event in events:
            now = after if event.shows_tokens else before
            now = Position(now.num_tokens, now.checksum, True, event.shows_end)
            self._choices[index], self._parts[index] = now, str(now)
            named.append(self._named(event.data, cached_tokens, ""))
        return b"".join(named)

    def usage(self, event: bytes, cached_tokens: int) -> bytes:
        """The event with the usage, with its id."""
        return self._named(event, cached_tokens, "u")

    def done(self, event: bytes, cached_tokens: int) -> bytes:
        """The last event, with its id."""
        return self._named(event, cached_tokens, "d")

    def _named(self, event: bytes, cached_tokens: int, mark: str) -> bytes:
        return f"id: {'.'.join(self._parts)}~{cached_tokens}{mark}\n".encode("ascii") + event


class Replay:
    """Recognizes tokens of the log that the client has already.

    Args:
        position: how much the client has.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self._seen = Position()

    @property
    def is_over(self) -> bool:
        """All tokens that the client has were recognized."""
        return self._seen.num_tokens == self._position.num_tokens

    def take(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens the client has; None if it has other tokens."""
        count = min(len(tokens), self._position.num_tokens - self._seen.num_tokens)
        self._seen = self._seen.after(tokens[:count])
        if self.is_over and self._seen.checksum != self._position.checksum:
            return None
        return count
