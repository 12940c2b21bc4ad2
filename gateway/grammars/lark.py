"""Pieces of grammars in Lark's notation, as llguidance reads it."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A model that may write any whitespace may write nothing else for ever: at most a space, or the
# end of a line and its indentation.
_WHITESPACE = r"(\n[ ]{0,16}|[ ])?"
# Keywords that llguidance does not know are errors, whatever a schema asks of it.
JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "lenient": False,
}
ANY_TEXT = "/(?s:.*)/"
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def escaped(text: str) -> str:
    """An expression that matches the text alone; ``re.escape`` escapes what llguidance refuses."""
    return _META.sub(r"\\\g<0>", text)


def literal(text: str) -> str:
    """The text; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def with_tokens(text: str, token_ids: Mapping[str, int]) -> str:
    """A text with markers, some of which may be special tokens.

    Args:
        token_ids: of special tokens, by name.
    """
    for name, token in token_ids.items():
        if name in text:
            before, _, after = text.partition(name)
            parts = with_tokens(before, token_ids), with_tokens(after, token_ids)
            return f"{parts[0]} <[{token}]> {parts[1]}"
    return literal(text)


def without(text: str) -> str:
    """A condition of an expression: it does not match what contains the text."""
    return f"~/(?s:.*){slashed(escaped(text))}(?s:.*)/"


def slashed(expression: str) -> str:
    """An expression as it stands between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", expression).replace("\n", r"\n")
