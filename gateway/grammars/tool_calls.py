"""The grammar of an answer that calls tools, or, if it is asked for JSON, is that."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from gateway.answers.formats import CallWrapper
from gateway.answers.tag_calls import Tags
from gateway.grammars.lark import json_value, literal, with_tokens
from gateway.grammars.schemas import check_schema
from gateway.grammars.tagged_arguments import TaggedCall


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """One call or several of these tools, as a family of models writes them; or else JSON.

    Attributes:
        tools: names and JSON schemas of their arguments.
        several: more than one call may follow.
        token_ids: of markers that are special tokens.
        otherwise: JSON schema of an answer without calls; None: there must be calls.
        tags: arguments stand between these; None: they are JSON.
    """

    wrapper: CallWrapper
    tools: Sequence[tuple[str, Mapping[str, Any]]]
    several: bool
    token_ids: Mapping[str, int]
    otherwise: Mapping[str, Any] | None = None
    tags: Tags | None = None

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
            if self.tags is None:
                head = f'{{"name": {json.dumps(name)}, "{wrapper.arguments}": '
                calls.append(f'{literal(head)} arguments_{index} "}}"')
                rules.append(f"arguments_{index}: {json_value(schema)}")
            else:
                call = TaggedCall(name, schema, self.tags, self.token_ids, f"arguments_{index}")
                calls.append(call.expression)
                rules += call.rules
        before, after = (
            with_tokens(text, self.token_ids) for text in (wrapper.before, wrapper.after)
        )
        more = f" ({literal(wrapper.between)} call)*" if self.several and wrapper.between else ""
        start = f"{before} call{more} {after}"
        if wrapper.each:
            start = f"one{more.replace('call', 'one')}"
            rules.append(f"one: {before} call {after}")
        if self.otherwise is not None:
            check_schema(self.otherwise)
            start += " | otherwise"
            rules.append(f"otherwise: {json_value(self.otherwise)}")
        rules = [f"start: {start}", f"call: {' | '.join(calls)}", *rules]
        return LLMatcher.grammar_from_lark("\n".join(rules))
