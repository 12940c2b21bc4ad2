"""Fields that are not supported, with what they may hold all the same, since it changes nothing.

Clients send many fields with their default values, and some that only inform who serves them.
"""

from collections.abc import Callable, Mapping
from typing import Any

# By field: the harmless values, or the type whose values all are. null always is.
IgnoredFields = Mapping[str, tuple[Any, ...] | type]

IGNORED: IgnoredFields = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": bool,  # there are none in texts
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of no tools
    "parallel_tool_calls": bool,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "metadata": dict,
    "store": bool,
    "prompt_cache_key": str,
    "safety_identifier": str,
    "service_tier": ("auto", "default"),
    "prediction": (),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
IGNORED_IN_STREAM_OPTIONS: IgnoredFields = {
    "include_obfuscation": (False,),
}
# An assistant's message, as the official clients give it out and users send it back.
IGNORED_IN_MESSAGE: IgnoredFields = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "token_ids": (),
}
_JSON_TYPES: dict[type, str] = {bool: "boolean", str: "string", dict: "object"}


def may_be_ignored(value: Any, ignored: tuple[Any, ...] | type) -> bool:
    """Whether a field with this entry may hold this value."""
    if value is None:
        return True
    if isinstance(ignored, type):
        return type(value) is ignored
    # True equals 1, but is no number
    return any(type(value) is type(other) and value == other for other in ignored)


def describe_ignored(ignored: IgnoredFields) -> Callable[[dict[str, Any]], None]:
    """Adds these fields to a body's description, which allows no others that it does not name."""

    def describe(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        for name, values in ignored.items():
            if isinstance(values, type):
                field: dict[str, Any] = {"type": ["null", _JSON_TYPES[values]]}
            else:
                field = {"enum": [None, *values]}
            field["description"] = "Accepted, without effect on the answer."
            schema["properties"].setdefault(name, field)

    return describe
