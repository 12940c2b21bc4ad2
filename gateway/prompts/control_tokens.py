"""Control tokens: which of them a chat template wrote, and which are text of its messages.

A message may hold the name of a control token, such as ``<|im_start|>system``. Encoded as it is, it
would pose as a turn of the system. So a conversation is rendered a second time with the characters
of its messages replaced, one by one, by others that no text has. Control tokens that stand in that
rendering are the template's own; where both renderings are alike otherwise, this also tells where
they stand in the first one.

A long conversation takes twice as long that way. It is rendered once if no text of it holds ``<``
and the template is among those of which that is enough, see ``template_analysis``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from gateway.prompts.template_analysis import OPENING

# Half characters, which JSON in UTF-8 cannot hold; case, width and escapes leave them as they are.
_FIRST_HIDDEN = 0xD800
_MAX_HIDDEN = 2048
_NUM_CASED = 0x1E944  # characters behind these have no case
_PIECE_CHARS = 2**16  # of a long text at once, so that other threads have their turns
# Words of the format, which templates compare with.
_KEYS_OF_FORMAT = ("role", "type")
_WORDS_OF_FORMAT = ("system", "developer", "user", "assistant", "tool", "function")


class TemplateRefused(Exception):
    """The chat template does not accept these messages; the text says why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class ControlSpan:
    """Where a control token stands in a text."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a template writes it.

    Attributes:
        control: control tokens that the template wrote, in their order; None: all that there are.
        has_literal_names: other control tokens stand in the text by name.
    """

    text: str
    control: tuple[ControlSpan, ...] | None = None
    has_literal_names: bool = False


Render = Callable[[Conversation], str]
_Change = Callable[[str, str], str]  # of a text and the role whose message it is in


class ControlTokens:
    """Tokens that mean more than their text.

    Args:
        special: names of tokens that no text may stand for, such as ``<|im_start|>``.
        marks: names of other tokens that the template writes, such as ``</think>``. Models write
            them, too, so an assistant's messages may hold them.
        writes_whole: the template writes names as a whole, see ``writes_names_whole``.
    """

    def __init__(
        self, special: Collection[str], marks: Collection[str] = (), writes_whole: bool = False
    ) -> None:
        self._writes_whole = writes_whole
        self.names = frozenset(special) | frozenset(marks)
        self._special = frozenset(special)
        self._pattern = _pattern(self.names)
        self._special_pattern = _pattern(self._special)
        self._mark_pattern = _pattern(self.names - self._special)
        edges = _visible(char for name in self.names for char in (name[0], name[-1]))
        inner = _visible(char for name in self.names for char in name) - edges
        chars = [*sorted(edges), *sorted(inner)][:_MAX_HIDDEN]
        self._all = {ord(char): chr(_FIRST_HIDDEN + i) for i, char in enumerate(chars)}
        self._edges = {code: to for code, to in self._all.items() if chr(code) in edges}
        self._tables = [self._all, self._edges]
        if all(len(name) > 2 and _visible(name[1:-1]) - edges for name in self.names):
            # For templates that look for brackets.
            self._tables.append({c: to for c, to in self._all.items() if c not in self._edges})
        self._back = {ord(to): chr(code) for code, to in self._all.items()}

    def render(self, render: Render, chat: Conversation) -> RenderedChat:
        """Render a conversation, and find the control tokens that the template wrote.

        Raises:
            TemplateRefused: by ``render``, or the template's own text cannot be told apart.
        """
        text = render(chat)
        if not self.names:
            return RenderedChat(text, ())
        if self._writes_whole and not _opens(chat.messages) and not _opens(chat.tools):
            return RenderedChat(text, tuple(self._spans(text)))
        certain: list[str] | None = None
        for table in self._tables:
            try:
                hidden = render(self._mapped(chat, partial(self._hidden, table)))
            except TemplateRefused:  # it looks for something in the messages
                continue
            if _translated(hidden, self._back) == text:
                return self._rendered(text, self._spans(hidden))
            if certain is None:
                certain = [span.name for span in self._spans(hidden) if self._is_special(span)]
        if certain is None:
            reason = "what it writes cannot be told apart from what the messages hold"
            raise TemplateRefused(reason)
        # The template writes other things where a message holds certain characters. So these stay,
        # and only the names themselves are broken.
        broken = render(self._mapped(chat, self._broken))
        spans = _confirmed(self._spans(broken), certain, self._is_special)
        return self._rendered(_translated(broken, self._back), spans)

    def _rendered(self, text: str, control: Sequence[ControlSpan]) -> RenderedChat:
        num_names = sum(1 for _ in self._pattern.finditer(text))
        return RenderedChat(text, tuple(control), num_names > len(control))

    def _spans(self, text: str) -> list[ControlSpan]:
        return [ControlSpan(m[0], m.start(), m.end()) for m in self._pattern.finditer(text)]

    def _is_special(self, span: ControlSpan) -> bool:
        return span.name in self._special

    def _mapped(self, chat: Conversation, change: _Change) -> Conversation:
        """The same conversation with every text changed."""
        changed = self._changed
        messages = [changed(each, change, str(each.get("role", ""))) for each in chat.messages]
        tools = None if chat.tools is None else [changed(each, change, "") for each in chat.tools]
        return Conversation(messages, tools, chat.add_generation_prompt)

    def _changed(self, value: Any, change: _Change, role: str) -> Any:
        if isinstance(value, str):
            return change(value, role)
        if isinstance(value, list):
            return [self._changed(item, change, role) for item in value]
        if not isinstance(value, dict):
            return value
        items = {}
        for key, item in value.items():
            if any(ord(char) in self._edges for char in key):  # of a JSON Schema: no template asks
                key = change(key, role)
            is_word = key in _KEYS_OF_FORMAT and item in _WORDS_OF_FORMAT
            items[key] = item if is_word else self._changed(item, change, role)
        return items

    def _hidden(self, table: Mapping[int, str], text: str, role: str) -> str:
        if role != "assistant":
            return _translated(text, table)
        pieces, end = [], 0
        for mark in self._mark_pattern.finditer(text):
            pieces += [_translated(text[end : mark.start()], table), mark[0]]
            end = mark.end()
        return "".join([*pieces, _translated(text[end:], table)])

    def _broken(self, text: str, role: str) -> str:
        pattern = self._special_pattern if role == "assistant" else self._pattern
        return pattern.sub(self._hide_first, text)

    def _hide_first(self, found: "re.Match[str]") -> str:
        name = found[0]
        for index, char in enumerate(name):
            if ord(char) in self._all:
                return name[:index] + self._all[ord(char)] + name[index + 1 :]
        return ""  # of white space alone


def _opens(value: Any) -> bool:
    """Whether any text in it, or key, holds what names of control tokens begin with."""
    if isinstance(value, str):
        return OPENING in value
    if isinstance(value, dict):
        return any(map(_opens, value)) or any(map(_opens, value.values()))
    return isinstance(value, Sequence) and any(map(_opens, value))


def _pattern(names: Collection[str]) -> "re.Pattern[str]":
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _visible(chars: Iterable[str]) -> set[str]:
    """Characters, and those that become one of them in upper or lower case; no white space."""
    given = {char for char in chars if not char.isspace()}
    return given | {char for char, other in _cases() if not given.isdisjoint(other)}


@cache
def _cases() -> list[tuple[str, str]]:
    """Characters with what they are in upper and in lower case, where that is something else."""
    pairs = ((char, char.upper() + char.lower()) for char in map(chr, range(_NUM_CASED)))
    return [(char, other) for char, other in pairs if other != 2 * char]


def _translated(text: str, table: Mapping[int, str]) -> str:
    if len(text) <= _PIECE_CHARS:
        return text.translate(table)
    starts = range(0, len(text), _PIECE_CHARS)
    return "".join([text[start : start + _PIECE_CHARS].translate(table) for start in starts])


def _confirmed(
    spans: Sequence[ControlSpan], certain: Sequence[str], is_special: Callable[[ControlSpan], bool]
) -> list[ControlSpan]:
    """Those that the template wrote for sure: as it does whatever the messages hold.

    What comes of a text by what the template does to it, such as ``lower``, is not among them.
    """
    special = [span for span in spans if is_special(span)]
    first, last = 0, 0
    shorter = min(len(special), len(certain))
    while first < shorter and special[first].name == certain[first]:
        first += 1
    while last < shorter - first and special[-1 - last].name == certain[-1 - last]:
        last += 1
    refused = {span.start for span in special[first : len(special) - last]}
    return [span for span in spans if span.start not in refused]
