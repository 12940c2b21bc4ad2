"""The parser of answers in the formats of ``formats.py``."""

from collections.abc import Mapping, Set
from enum import Enum, auto

from gateway.answers.call_body import CallBody, CallLog
from gateway.answers.events import AnswerEvent, Content, Reasoning
from gateway.answers.formats import Body, CallFormat, ReasoningFormat
from gateway.answers.json_calls import JsonCalls, NamedCalls
from gateway.answers.markers import TrimmedText, scan
from gateway.answers.tag_calls import TagCalls

_SPACES = " \t\r\n"


class _Part(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALLS = auto()


class FamilyParser:
    """Parses the text of one answer.

    Reasoning stands at the answer's beginning. Text between the markers of calls that is no call,
    is content, with its markers.

    Args:
        calls: None: calls are not looked for.
        reasoning: None: reasoning is not looked for.
        tools: names of the tools of the request, with those of their parameters that are strings.
        in_reasoning: the prompt ends with the marker that begins reasoning.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Mapping[str, Set[str]],
        in_reasoning: bool = False,
    ) -> None:
        self._format = calls
        self._reasoning = reasoning
        self._tools = tools
        self._buffer = ""
        self._part = _Part.REASONING if in_reasoning else _Part.CONTENT
        self._at_start = True  # of content, with nothing but white space so far
        self._may_reason = reasoning is not None and not in_reasoning
        self._content = TrimmedText()
        self._thoughts = TrimmedText(after_marker=True)
        self._log = CallLog()
        self._body: CallBody | None = None
        self._opened_by = ""  # the marker before the calls
        self._num_before = 0  # calls before that marker
        self._events: list[AnswerEvent] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[AnswerEvent]:
        rest, self._buffer = self._buffer, ""
        self._at_start = False
        while rest:
            _, rest = self._route(rest)
        if self._part is _Part.CALLS:
            self._close_calls("", at_marker=False)
        self._show(self._thoughts.finish(), Reasoning)
        self._show(self._content.finish(), Content)
        return self._take()

    def _step(self) -> bool:
        """Parse the buffer up to a marker; False if more text is needed."""
        if self._at_start and self._part is _Part.CONTENT and not self._begins():
            return False
        end, marker = scan(self._buffer, self._markers())
        before, rest = self._buffer[:end], self._buffer[end:]
        failed, unread = self._route(before)
        if failed or marker is None:
            self._buffer = unread + rest
            return failed
        self._buffer = rest[len(marker) :]
        self._pass_marker(marker)
        return True

    def _begins(self) -> bool:
        """Look at the beginning of content; False if more text is needed."""
        text = self._buffer.lstrip(_SPACES)
        if not text:
            return False
        if self._may_reason and self._reasoning is not None:
            marker = self._reasoning.open
            if text.startswith(marker):
                self._buffer = text[len(marker) :]
                self._part, self._may_reason = _Part.REASONING, False
                return True
            if marker.startswith(text):
                return False
        self._may_reason = self._at_start = False
        if self._format is not None and self._format.bare and text[0] == "{":
            self._buffer = text
            self._open_calls("")
        return True

    def _markers(self) -> tuple[str, ...]:
        if self._part is _Part.REASONING:
            assert self._reasoning is not None
            return (self._reasoning.close,)
        if self._format is None:
            return ()
        if self._part is _Part.CALLS:
            return self._format.opens + self._format.closes
        return self._format.opens

    def _route(self, text: str) -> tuple[bool, str]:
        """Parse text without markers.

        Returns:
            Whether it is no call where one was expected, and what must be parsed again, as content.
        """
        if self._part is _Part.REASONING:
            self._show(self._thoughts.push(text), Reasoning)
        elif self._part is _Part.CONTENT:
            self._show(self._content.push(text), Content)
        else:
            assert self._body is not None
            num_parsed = self._body.feed(text)
            self._events += self._log.take()
            if self._body.failed:
                self._fail("")
                return True, text[num_parsed:]
        return False, ""

    def _pass_marker(self, marker: str) -> None:
        if self._part is _Part.REASONING:
            self._thoughts.mark()
            self._content.mark()
            self._part, self._at_start = _Part.CONTENT, True
            return
        assert self._format is not None
        opens = marker in self._format.opens
        if self._part is _Part.CALLS:
            self._close_calls("" if opens else marker, at_marker=True)
        if opens:
            self._open_calls(marker)

    def _open_calls(self, marker: str) -> None:
        assert self._format is not None
        self._part = _Part.CALLS
        self._opened_by = marker
        if self._format.body is Body.TAGS:
            assert self._format.tags is not None
            self._body = TagCalls(self._log, self._format.tags, self._tools)
        elif self._format.body is Body.NAMED:
            self._body = NamedCalls(self._log)
        else:
            self._body = JsonCalls(self._log, None if marker else self._tools)
        self._num_before = self._log.num_calls

    def _close_calls(self, marker: str, at_marker: bool) -> None:
        assert self._body is not None
        self._body.close(at_marker)
        self._events += self._log.take()
        if self._body.failed or self._log.num_calls == self._num_before:
            self._fail(marker)
        else:
            self._content.mark()
        self._part = _Part.CONTENT

    def _fail(self, marker: str) -> None:
        """What follows the last call, if there is any, is content."""
        assert self._body is not None
        has_calls = self._log.num_calls > self._num_before
        if has_calls:
            self._content.mark()
        opened_by = "" if has_calls else self._opened_by
        self._show(self._content.push(opened_by + self._body.raw + marker), Content)
        self._part, self._body = _Part.CONTENT, None

    def _show(self, text: str, kind: type[Content] | type[Reasoning]) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events
