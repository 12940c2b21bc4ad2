"""Tokenizers of models that call tools, and a tool."""

from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from gateway.text.tokenizer import Tokenizer
from tests.support.tool_template import HERMES

DEMO_MODEL = str(Path(__file__).parents[3] / "models" / "demo")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def demo_tokenizer(
    template: str | None = HERMES,
    special: tuple[str, ...] = (),
    response_template: dict[str, Any] | None = None,
) -> Tokenizer:
    """The demo model's tokenizer with another chat template.

    Args:
        template: None: its own, which describes no tools.
        special: names of further special tokens.
        response_template: its own way to read answers.
    """
    source = AutoTokenizer.from_pretrained(DEMO_MODEL)
    if template is not None:
        source.chat_template = template
    if special:
        source.add_special_tokens({"additional_special_tokens": list(special)})
    source.response_template = response_template
    return Tokenizer(source)


@cache
def grammar_tokenizer() -> LLTokenizer:
    """The demo model's tokenizer, as grammars need it."""
    return LLTokenizer(Path(DEMO_MODEL, "tokenizer.json").read_text())


def allows(grammar: str, text: str) -> bool:
    """Whether a text is one of a grammar's."""
    tokenizer = grammar_tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def call_text(arguments: str, name: str = "add") -> str:
    """A call in the format of Hermes and Qwen."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
