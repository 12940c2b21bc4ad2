"""The parser of answers for models whose tokenizer comes with a response template."""

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gateway.answers.call_body import CallBody, CallLog, is_name
from gateway.answers.events import AnswerEvent, Content, Reasoning
from gateway.answers.formats import CallWrapper, ReasoningFormat
from gateway.answers.json_calls import JsonCalls
from gateway.answers.markers import TrimmedText
from gateway.answers.typed_arguments import json_of_arguments

_CONTENT = "content"
_CALLS = "tool_calls"
_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
# What makes a call of JSON that is written as a call already.
_PLAIN = (
    "{content}",
    {"name": "{content.name}", "arguments": "{content.arguments}"},
    {"name": "{name}", "arguments": "{arguments}"},
)


@dataclass(frozen=True, slots=True)
class ModelTemplate:
    """A response template, and what of transformers reads it.

    Attributes:
        template: its fields give the text between their markers, unparsed.
        new_parser: makes transformers' parser of a template, with the prompt's end as ``prefix``.
        read_calls: the value of the calls' field, from its text and what its marker captured.
        streams_json: calls are plain JSON, which is parsed while it arrives.
        values_are_texts: values of arguments come as text, whatever their type.
        marks: patterns and texts of all markers.
        wrapper: how calls are written where an answer must have some; None: that is not known.
        reasoning: the markers around reasoning; None: there are none, or not always the same.
    """

    template: Any
    new_parser: Callable[..., Any]
    read_calls: Callable[[str, dict[str, str]], Any] | None
    streams_json: bool
    values_are_texts: bool
    marks: tuple[str, ...]
    wrapper: CallWrapper | None = None
    reasoning: ReasoningFormat | None = None

    def prompt_end(self, text: str) -> str:
        """What the prompt has of the answer's message, from the end of a prompt; "" if unknown."""
        found = list(self.template.start_anchor_re.finditer(text))
        return text[found[-1].start() :] if found else ""


def read_model_template(source: Any) -> ModelTemplate | None:
    """Reads a tokenizer's response template.

    Returns:
        None if it has none, or one that this version of transformers does not read.
    """
    given = getattr(source, "response_template", None)
    if not isinstance(given, dict):
        return None
    try:
        from transformers.utils.chat_parsing import content_parsers, response_parser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        template, original = load_response_template(given), load_response_template(given)
        new_parser, process = response_parser.ResponseParser, content_parsers.process_field
        fields = template.fields
        marks = tuple(
            str(given["fields"][name].get(key))
            for name in fields
            for key in ("open", "open_pattern", "close", "close_pattern")
            if given["fields"][name].get(key) is not None
        )
        for each in fields.values():
            each.content, each.content_args = "text", {"strip": False}
            each.optional, each.join, each.transform_each = True, None, False
            groups = () if each.open_re is None else each.open_re.groupindex
            each.transform = {"text": "{content}"} | {name: f"{{{name}}}" for name in groups}
        calls = original.fields.get(_CALLS)
        reasoning: Mapping[str, Any] = next(
            (given["fields"][name] for name in fields if name in _REASONING), {}
        )
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return None
    around = _reasoning_format(reasoning)
    if calls is None:
        return ModelTemplate(template, new_parser, None, False, False, marks, reasoning=around)
    return ModelTemplate(
        template,
        new_parser,
        lambda text, captures: process(text, calls, captures),
        _is_plain_json(calls),
        calls.content != "json",
        marks,
        _wrapper(given["fields"][_CALLS]) if _is_plain_json(calls) else None,
        around,
    )


def preload_parser() -> None:
    """Import what parses by response templates, if this version of transformers has it."""
    with suppress(ImportError):
        import transformers.utils.chat_parsing

        assert transformers.utils.chat_parsing


class ModelTemplateParser:
    """Parses one answer with transformers' ``ResponseParser``.

    What cannot be read as calls is content, as the model wrote it, without its markers.

    Args:
        finds_calls: False: text of calls is content.
        prompt_end: the end of the prompt.
        strings: by tool, its parameters of type string.
    """

    def __init__(
        self,
        model: ModelTemplate,
        finds_calls: bool,
        prompt_end: str,
        strings: Mapping[str, Set[str]],
    ) -> None:
        self._model = model
        self._finds_calls = finds_calls and model.read_calls is not None
        self._strings = strings
        self._parser = model.new_parser(model.template, prefix=model.prompt_end(prompt_end))
        self._content = TrimmedText()
        self._thoughts = TrimmedText(after_marker=True)
        self._log = CallLog()
        self._body: CallBody | None = None
        self._events: list[AnswerEvent] = []
        self._raw = ""
        self._field = ""
        self._pass_prefix()

    def feed(self, text: str) -> list[AnswerEvent]:
        for event in self._parser.feed(text):
            self._apply(event, ends=False)
        return self._take()

    def finish(self) -> list[AnswerEvent]:
        _, events = self._parser.finalize()
        for event in events:
            self._apply(event, ends=True)
        self._show(self._thoughts.finish(), Reasoning)
        self._show(self._content.finish(), Content)
        return self._take()

    def _pass_prefix(self) -> None:
        for event in self._parser.initial_events:
            if event["type"] == "region_open":
                self._open(event["field"])
        self._take()

    def _apply(self, event: dict[str, Any], ends: bool) -> None:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._open(field)
        elif kind == "region_chunk":
            self._add(field, event["text"])
        else:
            self._close(field, event["value"], ends)

    def _open(self, field: str) -> None:
        self._raw = ""
        if self._is_calls(field):
            self._body = JsonCalls(self._log) if self._model.streams_json else None

    def _add(self, field: str, text: str) -> None:
        if self._is_calls(field):
            if self._body is None:
                self._raw += text
                return
            if not self._body.failed:
                text = text[self._body.feed(text) :]
                self._events += self._log.take()
            if self._body.failed:
                self._raw += self._body.raw + text
                self._body.raw = ""
        elif field in _REASONING:
            self._show(self._thoughts.push(text), Reasoning)
        else:
            self._show(self._content.push(text), Content)

    def _close(self, field: str, value: dict[str, str], ends: bool) -> None:
        if field in _REASONING:
            if not ends:
                self._thoughts.mark()
                self._content.mark()
        elif self._is_calls(field):
            self._close_calls(value, ends)

    def _close_calls(self, value: dict[str, str], ends: bool) -> None:
        num_before = self._log.num_calls
        if self._body is not None:
            if not self._body.failed:
                self._body.close(not ends)
                self._raw = self._body.raw
        elif not self._read_whole(value):
            self._raw = value["text"]
        else:
            self._raw = ""
        self._body = None
        self._events += self._log.take()
        if self._log.num_calls > num_before or not self._raw:
            self._content.mark()
        self._show(self._content.push(self._raw), Content)
        self._raw = ""

    def _read_whole(self, value: dict[str, str]) -> bool:
        """Read calls that have arrived as a whole; False if they cannot be read."""
        assert self._model.read_calls is not None
        captures = {name: text for name, text in value.items() if name != "text"}
        try:
            read = self._model.read_calls(value["text"], captures)
        except Exception:  # programs of the model's authors, on text of the model
            return False
        found = []
        for call in read if isinstance(read, list) else [read]:
            function = call.get("function", call) if isinstance(call, dict) else {}
            name = function.get("name")
            if not isinstance(name, str) or not is_name(name, None):
                return False
            found.append((name, function.get("arguments", {})))
        for name, arguments in found:
            self._log.begin(name)
            self._log.arguments(self._json(name, arguments))
            self._log.end()
        return bool(found)

    def _json(self, name: str, arguments: Any) -> str:
        strings = self._strings.get(name, frozenset())
        return json_of_arguments(arguments, strings, are_texts=self._model.values_are_texts)

    def _is_calls(self, field: str) -> bool:
        return self._finds_calls and field == _CALLS

    def _show(self, text: str, kind: type[Content] | type[Reasoning]) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events


def _wrapper(field: Mapping[str, Any]) -> CallWrapper | None:
    """How calls in plain JSON are written, if their markers are texts."""
    before, after = field.get("open"), field.get("close")
    if not isinstance(before, str) or not isinstance(after, str):
        return None
    return CallWrapper(before, after, between="\n" if field.get("repeats") else "", each=True)


def _reasoning_format(field: Mapping[str, Any]) -> ReasoningFormat | None:
    before, after = field.get("open"), field.get("close")
    if not isinstance(before, str) or not isinstance(after, str):
        return None
    return ReasoningFormat(before, after)


def _is_plain_json(calls: Any) -> bool:
    """Whether the field of calls is JSON with a name and arguments, and nothing besides."""
    if calls.content != "json" or calls.content_args:
        return False
    transform = calls.transform
    return isinstance(transform, dict) and transform.get("function") in _PLAIN
