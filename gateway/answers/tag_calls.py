"""Calls of tools that are written with tags around each argument."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto

from gateway.answers.call_body import CallLog, is_name
from gateway.answers.typed_arguments import json_of, quoted


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format.

    Attributes:
        name: before and behind the tool's name; "" where none is: the name begins at once, and ends
            where the first argument begins.
        key: before and behind an argument's name.
        value: before and behind its value.
        trims_lines: one line break at each end of a value belongs to the tags.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    trims_lines: bool = False


class _State(Enum):
    BEFORE_NAME = auto()
    NAME = auto()
    BEFORE_KEY = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


class TagCalls:
    """One call, whose arguments become JSON, one after the other.

    A value of a parameter of type string is text. Any other is JSON if it can be read as such, and
    text otherwise.

    Args:
        strings: by tool, its parameters of type string.
    """

    def __init__(self, calls: CallLog, tags: Tags, strings: Mapping[str, Set[str]]) -> None:
        self.raw = ""
        self.failed = False
        self._calls = calls
        self._tags = tags
        self._strings = strings
        self._tool: str | None = None
        self._key = ""
        self._num_arguments = 0
        self._text = ""  # not parsed yet
        self._state = _State.BEFORE_NAME if tags.name[0] else _State.NAME

    def feed(self, text: str) -> int:
        self._text += text
        while not self.failed:
            mark = self._mark()
            start = self._text.find(mark)
            if start < 0:
                break
            found, self._text = self._text[:start], self._text[start + len(mark) :]
            self._advance(found, mark)
        if not self.failed:
            return len(text)
        rest, self._text = self._text, ""
        return len(text) - len(rest)  # a tag ends in the new text, so the rest is part of it

    def close(self, at_marker: bool) -> None:
        text, self._text = self._text, ""
        if self._state is _State.NAME and not self._tags.name[1]:
            self._take_name(text)
            text = ""
        if self._tool is None:
            self.raw += text
            self.failed = bool(self.raw)
            return
        if self._state is _State.VALUE:
            self._take_value(text)
        if at_marker:
            self._calls.arguments("}" if self._num_arguments else "{}")
        self._calls.end()

    def _mark(self) -> str:
        """The tag that ends the current state."""
        tags = self._tags
        marks = {
            _State.BEFORE_NAME: tags.name[0],
            _State.NAME: tags.name[1] or tags.key[0],
            _State.BEFORE_KEY: tags.key[0],
            _State.KEY: tags.key[1],
            _State.BEFORE_VALUE: tags.value[0],
            _State.VALUE: tags.value[1],
        }
        return marks[self._state]

    def _advance(self, found: str, mark: str) -> None:
        """Take the text before a tag."""
        if self._state is _State.BEFORE_NAME:
            self.raw += found + mark
            self.failed = bool(found.strip())
            self._state = _State.NAME
        elif self._state is _State.NAME:
            self._take_name(found, mark)
            self._state = _State.BEFORE_KEY if self._tags.name[1] else _State.KEY
        elif self._state is _State.BEFORE_KEY:
            self._state = _State.KEY
        elif self._state is _State.KEY:
            self._key = found.strip()
            self._state = _State.BEFORE_VALUE if self._tags.value[0] else _State.VALUE
        elif self._state is _State.BEFORE_VALUE:
            self._state = _State.VALUE
        else:
            self._take_value(found)
            self._state = _State.BEFORE_KEY

    def _take_name(self, text: str, mark: str = "") -> None:
        name = text.strip()
        if not is_name(name, None):
            self.raw += text + mark
            self.failed = True
            return
        self._tool, self.raw = name, ""
        self._calls.begin(name)

    def _take_value(self, text: str) -> None:
        assert self._tool is not None
        if self._tags.trims_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        is_text = self._key in self._strings.get(self._tool, ())
        before = ", " if self._num_arguments else "{"
        self._calls.arguments(f"{before}{quoted(self._key)}: {json_of(text, is_text)}")
        self._num_arguments += 1
