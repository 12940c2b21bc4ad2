"""What a parser finds in the text of an answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins."""

    index: int  # of the call in its answer
    name: str  # of the tool


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int


AnswerEvent = Content | Reasoning | CallBegun | Arguments | CallEnded


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new in a call.

    Attributes:
        index: of the call in its answer.
        name: of the tool, None if the call began in an earlier delta.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Events that are shown together."""

    content: str
    reasoning: str
    calls: tuple[CallDelta, ...]


class AnswerParser(Protocol):
    """Finds the parts of one answer."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """The events that more text makes certain."""

    def finish(self) -> list[AnswerEvent]:
        """The events of text that was held back, at the end of all text."""


def merged(events: Iterable[AnswerEvent]) -> ParsedText:
    """The events as one delta: their texts joined, and one entry for each call."""
    content, reasoning = [], []
    calls: dict[int, CallDelta] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallBegun):
            calls[event.index] = CallDelta(event.index, event.name, "")
        elif isinstance(event, Arguments):
            add_call(calls, CallDelta(event.index, None, event.text))
    return ParsedText("".join(content), "".join(reasoning), tuple(calls.values()))


def joined_calls(parts: Iterable[Sequence[CallDelta]]) -> tuple[CallDelta, ...]:
    """Consecutive deltas of calls as one entry for each call."""
    calls: dict[int, CallDelta] = {}
    for part in parts:
        for call in part:
            add_call(calls, call)
    return tuple(calls.values())


def add_call(calls: dict[int, CallDelta], new: CallDelta) -> None:
    """Append a delta to the one of the same call, by index."""
    old = calls.get(new.index)
    if old is not None:
        new = CallDelta(new.index, old.name, old.arguments + new.arguments)
    calls[new.index] = new
