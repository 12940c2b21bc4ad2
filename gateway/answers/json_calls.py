"""Calls of tools that are written in JSON."""

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from gateway.answers.call_body import CallLog, is_name

_STRUCTURE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_ARGUMENTS = ("arguments", "parameters", "args")
_KEYS = frozenset({"name", "type", "id", "call_id", "index", *_ARGUMENTS})
_BETWEEN = ",;[]"
_CLOSE_MARK = "]"
_MAX_MARK_CHARS = 16


class JsonValue:
    """Finds the end of one JSON value, which need not be valid, in text that arrives in pieces."""

    def __init__(self, first: str) -> None:
        self.is_string = first == '"'
        self._is_scalar = first not in '"{['
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """The end of the value's part in ``text[start:]``, and whether the value ends there."""
        if self._is_scalar:
            end = _SCALAR_END.search(text, start)
            return (len(text), False) if end is None else (end.start(), True)
        while start < len(text):
            if self._escaped:
                self._escaped = False
                start += 1
                continue
            found = (_QUOTE_OR_ESCAPE if self._in_string else _STRUCTURE).search(text, start)
            if found is None:
                break
            start = found.end()
            char = found[0]
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
                if self.is_string and not self._in_string:
                    return start, True
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return start, True
        return len(text), False


class _State(Enum):
    BETWEEN = auto()  # objects
    BEFORE_KEY = auto()
    KEY = auto()
    BEFORE_COLON = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


class JsonCalls:
    """Objects with a ``name`` and ``arguments``, one or several, in a list or one after the other.

    Args:
        known: the tools' names, if objects with other names, or with keys that calls do not have,
            are plain text.
    """

    def __init__(self, calls: CallLog, known: Collection[str] | None = None) -> None:
        self.raw = ""
        self.failed = False
        self._calls = calls
        self._known = known
        self._state = _State.BETWEEN
        self._num_calls = 0
        self._begun = False  # the call of this object was shown
        self._has_arguments = False
        self._key = ""
        self._held = ""  # arguments that stand before the name
        self._text = ""  # of the key or value so far, without what was shown
        self._value: JsonValue | None = None

    def feed(self, text: str) -> int:
        position = 0
        while position < len(text) and not self.failed:
            if self._state in (_State.KEY, _State.VALUE):
                end = self._feed_value(text, position)
            else:
                end = position + 1
                self._take(text[position])
            if not self._begun:
                self.raw += text[position:end]
            position = end
            if self._state is _State.BETWEEN and not self.failed and self._num_calls:
                self.raw = ""
        return position

    def close(self, at_marker: bool) -> None:  # noqa: ARG002
        if self._begun:
            self._show_string(ended=False)
            self._end_call()
            self._reset()
        self.failed = bool(self.raw)

    def _take(self, char: str) -> None:
        """Take one character outside of keys and values."""
        state = self._state
        if char.isspace():
            return
        if state is _State.BETWEEN:
            self._take_between(char)
        elif state is _State.BEFORE_KEY and char == '"':
            self._start(_State.KEY, char)
        elif state is _State.BEFORE_KEY and char == "}":
            self._end_object()
        elif state is _State.BEFORE_COLON and char == ":":
            self._state = _State.BEFORE_VALUE
        elif state is _State.BEFORE_VALUE:
            self._start(_State.VALUE, char)
        elif not (state is _State.BEFORE_KEY and char == ","):
            self._fail()

    def _take_between(self, char: str) -> None:
        if char == "{":
            self._reset()
            self._state = _State.BEFORE_KEY
        elif char not in _BETWEEN and not (char == "}" and self._num_calls):
            self._fail()

    def _start(self, state: _State, first: str) -> None:
        """A key or value begins with this character."""
        if state is _State.VALUE:
            is_name_value = self._key == "name"
            if first in ",}]:" or (is_name_value and (first != '"' or self._begun)):
                self._fail()
                return
        if state is _State.KEY:
            self._key = ""
        self._state = state
        self._value = JsonValue(first)
        self._value.feed(first, 0)
        self._text = first
        self._show()

    def _feed_value(self, text: str, start: int) -> int:
        assert self._value is not None
        end, ended = self._value.feed(text, start)
        self._text += text[start:end]
        self._show()
        if ended:
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._state is _State.KEY:
            self._key = _string(self._text) or ""
            if self._known is not None and self._key not in _KEYS and not self._begun:
                self._fail()
                return
            self._state = _State.BEFORE_COLON
            return
        self._state = _State.BEFORE_KEY
        if self._key == "name":
            self._begin(_string(self._text))
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            self._show_string(ended=True)
        self._text = ""

    def _begin(self, name: str | None) -> None:
        if name is None or not is_name(name, self._known):
            self._fail()
            return
        self._calls.begin(name)
        self._begun = True
        self._num_calls += 1
        self.raw = ""
        self._calls.arguments(self._held)
        self._held = ""

    def _show(self) -> None:
        """Show what is new of arguments; strings are shown whole, without their quotes."""
        is_shown = self._state is _State.VALUE and self._key in _ARGUMENTS
        if not is_shown or self._value is None or self._value.is_string:
            return
        self._give(self._text)
        self._text = ""

    def _show_string(self, ended: bool) -> None:
        if self._key in _ARGUMENTS and self._text:
            text = _string(self._text) if ended else None
            self._give(self._text if text is None else text)
            self._text = ""

    def _give(self, text: str) -> None:
        if self._begun:
            self._calls.arguments(text)
        else:
            self._held += text

    def _end_object(self) -> None:
        if not self._begun:
            self._fail()
            return
        if not self._has_arguments:
            self._calls.arguments("{}")
        self._end_call()
        self._reset()
        self._state = _State.BETWEEN

    def _end_call(self) -> None:
        self._calls.end()
        self._begun = False

    def _fail(self) -> None:
        if self._begun:
            self._end_call()
        self.failed = True

    def _reset(self) -> None:
        """Forget the last object."""
        self._begun = self._has_arguments = False
        self._key = self._held = self._text = ""
        self._value = None


class NamedCalls:
    """Either JSON as above, or a name with its arguments: ``name[ARGS]{...}`` or ``name{...}``."""

    def __init__(self, calls: CallLog) -> None:
        self.raw = ""
        self.failed = False
        self._calls = calls
        self._json: JsonCalls | None = None
        self._name = ""
        self._mark: str | None = None  # that is being read, such as [ARGS]
        self._skips = False  # the id of the call
        self._begun = False
        self._ended = False
        self._value: JsonValue | None = None

    def feed(self, text: str) -> int:
        position = 0
        while position < len(text) and not self.failed:
            if self._json is not None:
                position += self._json.feed(text[position:])
                self.raw, self.failed = self._json.raw, self._json.failed
            elif self._value is not None:
                position = self._feed_arguments(text, position)
            elif not self._name and self._mark is None and text[position] in "[{":
                self._json = JsonCalls(self._calls)
                self.raw, self._json.raw = "", self.raw
            else:
                self.raw += text[position]
                self._take(text[position])
                position += 1
        return position

    def close(self, at_marker: bool) -> None:
        if self._json is not None:
            self._json.close(at_marker)
            self.raw, self.failed = self._json.raw, self._json.failed
            return
        if self._begun and not self._ended:
            self._calls.end()
            self._ended = True
        self.failed = bool(self.raw)

    def _take(self, char: str) -> None:
        """Take one character before or behind the arguments."""
        if self._ended:
            if char.isspace():
                self.raw = ""
            else:
                self.failed = True
        elif self._mark is not None:
            self._take_mark(char)
        elif self._begun:
            self.raw = ""
            if not char.isspace():
                self._start(char)
        elif char == "{":
            self._begin()
            if not self.failed:
                self._start(char)
        elif char == "[":
            self._mark = char
        elif not self._skips and not (char.isspace() and not self._name):
            self._name += char
            self.failed = not is_name(self._name.rstrip(), None)

    def _take_mark(self, char: str) -> None:
        assert self._mark is not None
        self._mark += char
        if char != _CLOSE_MARK:
            self.failed = len(self._mark) > _MAX_MARK_CHARS
            return
        mark, self._mark = self._mark, None
        if mark == "[ARGS]":
            self._begin()
        elif mark == "[CALL_ID]":
            self._skips = True
        else:
            self.failed = True

    def _begin(self) -> None:
        name = self._name.rstrip()
        if not is_name(name, None):
            self.failed = True
            return
        self._calls.begin(name)
        self._begun = True
        self.raw = ""

    def _start(self, first: str) -> None:
        self.raw = ""
        self._value = JsonValue(first)
        self._value.feed(first, 0)
        self._calls.arguments(first)

    def _feed_arguments(self, text: str, start: int) -> int:
        assert self._value is not None
        end, ended = self._value.feed(text, start)
        self._calls.arguments(text[start:end])
        if ended:
            self._calls.end()
            self._value, self._ended = None, True
        return end


def _string(text: str) -> str | None:
    """The value of a JSON string, None if it is not valid."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
