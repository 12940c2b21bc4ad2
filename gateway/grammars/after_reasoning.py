"""Structure of an answer that begins with reasoning, which may be anything."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.answers.formats import ReasoningFormat
from gateway.grammars.constraints import Structure
from gateway.grammars.lark import ANY_TEXT, literal, with_tokens


@dataclass(frozen=True, slots=True)
class AfterReasoning:
    """An answer of some structure, with reasoning before it.

    Attributes:
        structure: of the answer.
        reasoning: the markers around it.
        has_begun: the prompt ends with the first marker; else the answer may do without reasoning.
        token_ids: of markers that are special tokens.
    """

    structure: Structure
    reasoning: ReasoningFormat
    has_begun: bool
    token_ids: Mapping[str, int]

    def grammar(self) -> str:
        """As llguidance reads it.

        Raises:
            ValueError: the reason why it is none.
        """
        reasoning = self.reasoning
        if reasoning.close in self.token_ids:
            thoughts = f"(text {with_tokens(reasoning.close, self.token_ids)})"
            rules = [f"text: TEXT?\nTEXT: {ANY_TEXT}"]
        else:
            thoughts = "thoughts"
            rules = [f"thoughts[suffix={literal(reasoning.close)}]: {ANY_TEXT}"]
        behind = f"{thoughts} /\\n{{1,2}}/?"
        if not self.has_begun:
            behind = f"({with_tokens(reasoning.open, self.token_ids)} {behind})?"
        head = "\n".join([f"start: {behind} @answer", *rules])
        return json.dumps({"grammars": [{"lark_grammar": head}, _named(self.structure.grammar())]})


def _named(grammar: str) -> dict[str, object]:
    """A grammar with the name by which another refers to it."""
    if not grammar.startswith("{"):
        return {"name": "answer", "lark_grammar": grammar}
    [found] = json.loads(grammar)["grammars"]
    return {**found, "name": "answer"}
