"""Finds the control tokens that a chat template wrote, and not a message.

A message may contain the name of a control token, such as ``<|im_start|>system``. If it became that
token, a user could forge a message of the system. So a conversation is rendered twice, the second
time with each character of its messages replaced by one that no text has. Control tokens in the
second rendering are the template's own. Where the renderings are equal otherwise, their positions
are the same in the first one.

The second rendering doubles the time of a long conversation. It is left out if no text contains
``<`` and the template is one for which that is safe, see ``template_analysis``.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from gateway.prompts.template_analysis import OPENING
from gateway.prompts.template_options import DEFAULT_TEMPLATE_OPTIONS, TemplateOptions

# Surrogates, which JSON in UTF-8 cannot hold; changes of case, width and escapes keep them.
_FIRST_HIDDEN = 0xD800
_MAX_HIDDEN = 2048
_NUM_CASED = 0x1E944  # characters from here on have no case
_PIECE_CHARS = 2**16  # of a long text at once, so that other threads can run in between
# Keys and values of the format, which templates compare with constants.
_KEYS_OF_FORMAT = ("role", "type")
_WORDS_OF_FORMAT = ("system", "developer", "user", "assistant", "tool", "function")


class TemplateRefused(Exception):
    """The chat template does not accept these messages, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    options: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS


@dataclass(frozen=True, slots=True)
class ControlSpan:
    """The position of a control token in a text."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text that a template rendered from a conversation.

    Attributes:
        control: control tokens that the template wrote, in order; None: all in the text.
        has_literal_names: the text also has names of control tokens that are plain text.
    """

    text: str
    control: tuple[ControlSpan, ...] | None = None
    has_literal_names: bool = False


Render = Callable[[Conversation], str]
_Change = Callable[[str, str], str]  # of a text and the role of its message


class ControlTokens:
    """The control tokens of a model: tokens with a meaning beyond their text.

    Args:
        special: names of tokens that no message may contain, such as ``<|im_start|>``.
        marks: names of other tokens that the template writes, such as ``</think>``. Models generate
            them, too, so an assistant's messages may contain them.
        writes_whole: the template writes names only as a whole, see ``writes_names_whole``.

    Attributes:
        edges: characters at which names begin or end, without letters and digits.
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
        self.edges = frozenset(char for char in edges if not char.isalnum())
        inner = _visible(char for name in self.names for char in name) - edges
        chars = [*sorted(edges), *sorted(inner)][:_MAX_HIDDEN]
        self._all = {ord(char): chr(_FIRST_HIDDEN + i) for i, char in enumerate(chars)}
        self._edges = {code: to for code, to in self._all.items() if chr(code) in edges}
        self._tables = [self._all, self._edges]
        if all(len(name) > 2 and _visible(name[1:-1]) - edges for name in self.names):
            # For templates that search for brackets.
            self._tables.append({c: to for c, to in self._all.items() if c not in self._edges})
        self._back = {ord(to): chr(code) for code, to in self._all.items()}

    def render(self, render: Render, chat: Conversation) -> RenderedChat:
        """Render a conversation, and find the control tokens that the template wrote.

        Raises:
            TemplateRefused: from ``render``, or they cannot be found.
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
            except TemplateRefused:  # it needs some text that was replaced
                continue
            if _translated(hidden, self._back) == text:
                return self._rendered(text, self._spans(hidden))
            if certain is None:
                certain = [span.name for span in self._spans(hidden) if self._is_special(span)]
        if certain is None:
            reason = "what it writes cannot be told apart from what the messages hold"
            raise TemplateRefused(reason)
        # The template's output depends on characters of the messages. So these stay, and only the
        # names of control tokens are changed, by one character.
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
        return Conversation(messages, tools, chat.options)

    def _changed(self, value: Any, change: _Change, role: str) -> Any:
        if isinstance(value, str):
            return change(value, role)
        if isinstance(value, list):
            return [self._changed(item, change, role) for item in value]
        if not isinstance(value, dict):
            return value
        items = {}
        for key, item in value.items():
            if any(
                ord(char) in self._edges for char in key
            ):  # of a JSON Schema; no template reads it
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
        return ""  # the name is white space


def _opens(value: Any) -> bool:
    """Whether any text or key in a value contains ``OPENING``."""
    if isinstance(value, str):
        return OPENING in value
    if isinstance(value, dict):
        return any(map(_opens, value)) or any(map(_opens, value.values()))
    return isinstance(value, Sequence) and any(map(_opens, value))


def _pattern(names: Collection[str]) -> "re.Pattern[str]":
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _visible(chars: Iterable[str]) -> set[str]:
    """Characters without white space, and those whose upper or lower case is one of them."""
    given = {char for char in chars if not char.isspace()}
    return given | {char for char, other in _cases() if not given.isdisjoint(other)}


@cache
def _cases() -> list[tuple[str, str]]:
    """Characters with their upper and lower case, where either differs."""
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
    """The spans that the template writes whatever the messages contain.

    A name that arises from text of a message, such as by ``lower``, is left out.
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
