"""What a chat template is given besides messages and tools."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Arguments of transformers' ``apply_chat_template``, and names that templates are always given.
_RESERVED = frozenset(
    [
        "messages",
        "conversation",
        "chat_template",
        "tools",
        "documents",
        "add_generation_prompt",
        "tokenize",
        "padding",
        "continue_final_message",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
    ]
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation is rendered.

    Attributes:
        add_generation_prompt: the text ends with the beginning of the next answer.
        continues_final: the text ends with the last message, which is not complete.
        variables: of the template, by name.
    """

    add_generation_prompt: bool = True
    continues_final: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_TEMPLATE_OPTIONS = TemplateOptions()


def is_variable(name: str) -> bool:
    """Whether clients may give a template a variable of this name."""
    is_token = name.endswith(("_token", "_tokens"))
    return _NAME.fullmatch(name) is not None and name not in _RESERVED and not is_token


def text_that_opens(value: Any, edges: frozenset[str]) -> str | None:
    """A text in a value with a character at which control tokens begin or end; None: there is none.

    Args:
        edges: these characters.
    """
    if isinstance(value, str):
        return None if edges.isdisjoint(value) else value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return None
    found = (text_that_opens(part, edges) for part in parts)
    return next((text for text in found if text is not None), None)
