"""Ids of Server-Sent Events: what the reader of a stream has, so that any gateway can go on there.

An id holds, for every choice, how many tokens its reader has seen and a checksum of them; whether
it has begun, and whether it has ended. Text after a position is a pure function of the tokens up
to it, so that is all it takes. The checksum tells whether the log continues the same tokens: an
engine that lost them may have drawn others.

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
from gateway.openai.serializers import StreamEvent
from gateway.text.choice_text import Delta

_CHOICE = r"(?:[0-9]{1,9}[be][0-9a-f]{8})?"
_ID = re.compile(rf"({_CHOICE}(?:\.{_CHOICE})*)~([0-9]{{1,12}})([ud]?)")
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Position:
    """What the reader of a stream has of one choice."""

    num_tokens: int = 0
    checksum: int = 0
    begun: bool = False
    ended: bool = False

    def after(self, tokens: Sequence[int]) -> "Position":
        """With more tokens."""
        checksum = zlib.crc32(np.asarray(tokens, "<i4").tobytes(), self.checksum)
        return Position(self.num_tokens + len(tokens), checksum, True, self.ended)

    def __str__(self) -> str:
        if not self.begun:
            return ""
        return f"{self.num_tokens}{'e' if self.ended else 'b'}{self.checksum:08x}"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """What the reader of a stream has.

    Attributes:
        choices: by index; empty if it has nothing at all.
        cached_tokens: of the prompts, as far as they were known.
        has_usage: the usage was shown, or is not to be.
        is_done: nothing is left to show.
    """

    choices: tuple[Position, ...] = ()
    cached_tokens: int = 0
    has_usage: bool = False
    is_done: bool = False

    @staticmethod
    def parse(text: str | None) -> "StreamPosition":
        """Of the id of the last event that was seen; None for none.

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
    """Names the events of one stream.

    Args:
        start: where the stream goes on.
    """

    def __init__(self, num_choices: int, start: StreamPosition) -> None:
        self._choices = list(start.choices) or [Position()] * num_choices
        self._parts = [str(choice) for choice in self._choices]

    def chunk(
        self, index: int, delta: Delta, events: Sequence[StreamEvent], cached_tokens: int
    ) -> bytes:
        """The events of a delta, each with its id."""
        before, named = self._choices[index], []
        after = before.after(delta.token_ids)
        for event in events:
            now = after if event.shows_tokens else before
            now = Position(now.num_tokens, now.checksum, True, event.shows_end)
            self._choices[index], self._parts[index] = now, str(now)
            named.append(self._named(event.data, cached_tokens, ""))
        return b"".join(named)

    def usage(self, event: bytes, cached_tokens: int) -> bytes:
        """The event that tells what the answer cost."""
        return self._named(event, cached_tokens, "u")

    def done(self, event: bytes, cached_tokens: int) -> bytes:
        """The last event."""
        return self._named(event, cached_tokens, "d")

    def _named(self, event: bytes, cached_tokens: int, mark: str) -> bytes:
        return f"id: {'.'.join(self._parts)}~{cached_tokens}{mark}\n".encode("ascii") + event


class Replay:
    """Tokens that the client has seen come again, from the log.

    Args:
        position: what the client has.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self._seen = Position()

    @property
    def is_over(self) -> bool:
        """All have come."""
        return self._seen.num_tokens == self._position.num_tokens

    def take(self, tokens: Sequence[int]) -> int | None:
        """How many of these the client has; None if it has seen others."""
        count = min(len(tokens), self._position.num_tokens - self._seen.num_tokens)
        self._seen = self._seen.after(tokens[:count])
        if self.is_over and self._seen.checksum != self._position.checksum:
            return None
        return count
