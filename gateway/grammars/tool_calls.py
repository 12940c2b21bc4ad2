"""The grammar of an answer that must call tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from gateway.answers.formats import CallWrapper
from gateway.grammars.constraints import JSON_OPTIONS
from gateway.grammars.schemas import check_schema


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """One call or several of these tools, as a family of models writes them, and nothing besides.

    Attributes:
        tools: names and JSON schemas of their arguments.
        several: more than one call may follow.
        token_ids: of markers that are special tokens.
    """

    wrapper: CallWrapper
    tools: Sequence[tuple[str, Mapping[str, Any]]]
    several: bool
    token_ids: Mapping[str, int]

    def grammar(self) -> str:
        """As llguidance reads it.

        Raises:
            ValueError: the reason why it is none.
        """
        wrapper = self.wrapper
        rules, calls = [], []
        for index, (name, given) in enumerate(self.tools):
            schema = {"type": "object", **given}
            check_schema(schema)
            head = f'{{"name": {json.dumps(name)}, "{wrapper.arguments}": '
            calls.append(f'{_text(head)} arguments_{index} "}}"')
            written = json.dumps({**schema, "x-guidance": JSON_OPTIONS})
            rules.append(f"arguments_{index}: %json {written}")
        before, after = self._marker(wrapper.before), self._marker(wrapper.after)
        more = f" ({_text(wrapper.between)} call)*" if self.several and wrapper.between else ""
        start = f"start: {before} call{more} {after}"
        if wrapper.each:
            start = f"start: one{more.replace('call', 'one')}"
            rules.append(f"one: {before} call {after}")
        return LLMatcher.grammar_from_lark("\n".join([start, f"call: {' | '.join(calls)}", *rules]))

    def _marker(self, text: str) -> str:
        """A text with markers, some of which may be special tokens."""
        for name, token in self.token_ids.items():
            if name in text:
                before, _, after = text.partition(name)
                return f"{self._marker(before)} <[{token}]> {self._marker(after)}"
        return _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
