"""What the parsers of calls, between the markers around them, have in common."""

import re
from collections.abc import Collection
from typing import Protocol

from gateway.answers.events import AnswerEvent, Arguments, CallBegun, CallEnded

_NAME = re.compile(r"[\w.:/-]+")


class CallLog:
    """The calls found so far in one answer, and the events that are not taken yet."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[AnswerEvent] = []

    def begin(self, name: str) -> None:
        """A call begins; the calls before it have ended."""
        self._events.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the last call."""
        if text:
            self._events.append(Arguments(self.num_calls - 1, text))

    def end(self) -> None:
        """The last call is complete."""
        self._events.append(CallEnded(self.num_calls - 1))

    def take(self) -> list[AnswerEvent]:
        """The events since the last call of this method."""
        events, self._events = self._events, []
        return events


class CallBody(Protocol):
    """Parses the text between the markers of calls.

    Attributes:
        raw: text that belongs to no call so far.
        failed: what follows is no call; ``raw`` and all further text are plain text.
    """

    raw: str
    failed: bool

    def feed(self, text: str) -> int:
        """Parse more text; return how many characters were parsed: all, unless it failed."""

    def close(self, at_marker: bool) -> None:
        """The text ends.

        Args:
            at_marker: at a marker that ends calls, and not since the answer ends.
        """


def is_name(text: str, known: Collection[str] | None) -> bool:
    """Whether a text can be the name of a tool.

    Args:
        known: the tools' names, if no other is accepted.
    """
    return text in known if known is not None else _NAME.fullmatch(text) is not None
