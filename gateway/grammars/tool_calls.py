"""The grammar of an answer that calls tools, or, if it is asked for JSON, is that."""

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
    """One call or several of these tools, as a family of models writes them; or else JSON.

    Attributes:
        tools: names and JSON schemas of their arguments.
        several: more than one call may follow.
        token_ids: of markers that are special tokens.
        otherwise: JSON schema of an answer without calls; None: there must be calls.
    """

    wrapper: CallWrapper
    tools: Sequence[tuple[str, Mapping[str, Any]]]
    several: bool
    token_ids: Mapping[str, int]
    otherwise: Mapping[str, Any] | None = None

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
            rules.append(f"arguments_{index}: {_json(schema)}")
        before, after = self._marker(wrapper.before), self._marker(wrapper.after)
        more = f" ({_text(wrapper.between)} call)*" if self.several and wrapper.between else ""
        start = f"{before} call{more} {after}"
        if wrapper.each:
            start = f"one{more.replace('call', 'one')}"
            rules.append(f"one: {before} call {after}")
        if self.otherwise is not None:
            check_schema(self.otherwise)
            start += " | otherwise"
            rules.append(f"otherwise: {_json(self.otherwise)}")
        rules = [f"start: {start}", f"call: {' | '.join(calls)}", *rules]
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def _marker(self, text: str) -> str:
        """A text with markers, some of which may be special tokens."""
        for name, token in self.token_ids.items():
            if name in text:
                before, _, after = text.partition(name)
                return f"{self._marker(before)} <[{token}]> {self._marker(after)}"
        return _text(text)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
