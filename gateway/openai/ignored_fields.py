"""Fields that are not supported, with what they may hold all the same, since it changes nothing.

Clients send many fields with their default values, and some that only inform who serves them.
"""

from collections.abc import Callable, Mapping
from typing import Any

# By field: the harmless values, or the type whose values all are. null always is.
Neutral = Mapping[str, tuple[Any, ...] | type]

NEUTRAL: Neutral = {
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
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {
    "include_obfuscation": (False,),
}
# An assistant's message, as the official clients give it out and users send it back.
NEUTRAL_IN_MESSAGE: Neutral = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "token_ids": (),
}
_JSON_TYPES: dict[type, str] = {bool: "boolean", str: "string", dict: "object"}


def is_harmless(value: Any, neutral: tuple[Any, ...] | type) -> bool:
    """Whether a field with this entry may hold this value."""
    if value is None:
        return True
    if isinstance(neutral, type):
        return type(value) is neutral
    # True equals 1, but is no number
    return any(type(value) is type(other) and value == other for other in neutral)


def describing(neutral: Neutral) -> Callable[[dict[str, Any]], None]:
    """Adds these fields to a body's description, which allows no others that it does not name."""

    def describe(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        for name, values in neutral.items():
            if isinstance(values, type):
                field: dict[str, Any] = {"type": ["null", _JSON_TYPES[values]]}
            else:
                field = {"enum": [None, *values]}
            field["description"] = "Accepted, without effect on the answer."
            schema["properties"].setdefault(name, field)

    return describe
