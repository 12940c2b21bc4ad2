"""What a text has to look like, and the grammar that llguidance reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from gateway.grammars.lark import JSON_OPTIONS, escaped
from gateway.grammars.schemas import check_schema


class Structure(Protocol):
    """What an answer has to look like."""

    def grammar(self) -> str:
        """As llguidance reads it.

        Raises:
            ValueError: the reason why it is none.
        """


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema allows."""

    schema: Mapping[str, Any]

    def grammar(self) -> str:
        """As llguidance reads it.

        Raises:
            ValueError: the reason why it is none.
        """
        check_schema(self.schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(self.schema), overrides=JSON_OPTIONS)


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that an expression matches as a whole."""

    pattern: str

    def grammar(self) -> str:
        """As llguidance reads it."""
        return LLMatcher.grammar_from_regex(self.pattern)


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several texts."""

    texts: Sequence[str]

    def grammar(self) -> str:
        """As llguidance reads it."""
        # One expression compiles several times faster than as many strings.
        return LLMatcher.grammar_from_regex("|".join(map(escaped, self.texts)))


@dataclass(frozen=True, slots=True)
class Grammar:
    """A context-free grammar in Lark's notation, or llama.cpp's GBNF."""

    text: str

    def grammar(self) -> str:
        """As llguidance reads it.

        Raises:
            ValueError: the reason why it is none.
        """
        if "::=" not in self.text:
            return LLMatcher.grammar_from_lark(self.text)
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(self.text))
        except Exception as error:  # its parser raises plain ones
            raise ValueError(f"it is no GBNF: {error}") from None


Constraint = JsonSchema | Regex | Choices | Grammar
