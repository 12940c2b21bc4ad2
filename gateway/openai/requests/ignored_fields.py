"""Unsupported fields, with the values that are accepted because ignoring them changes nothing.

Many clients send all fields with their default values, and some fields are only information for
the server.
"""

from collections.abc import Callable, Mapping
from typing import Any

# By field: the values that may be ignored, or the type all of whose values may be. null always may.
IgnoredFields = Mapping[str, tuple[Any, ...] | type]

IGNORED: IgnoredFields = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": bool,  # answers never have any
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of completions, which have no tools
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
    "verbosity": (),
    "web_search_options": (),
}
# Why a field is refused, where its name does not say it.
REASONS: Mapping[str, str] = {
    "suffix": "text is only added at the end; for a model that was trained to fill in the middle, "
    "write the special tokens of its format and the suffix into the prompt",
    "thread": "conversations are not kept here; send all messages",
}
IGNORED_IN_STREAM_OPTIONS: IgnoredFields = {
    "include_obfuscation": (False,),
}
# In an assistant's message, as official clients return it and users send it back.
IGNORED_IN_MESSAGE: IgnoredFields = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "token_ids": (),
    "parsed": dict,  # the content, as openai's clients show it in an object of the caller's
    "provider_specific_fields": dict,  # LiteLLM's
}
_JSON_TYPES: dict[type, str] = {bool: "boolean", str: "string", dict: "object"}


def may_be_ignored(value: Any, ignored: tuple[Any, ...] | type) -> bool:
    """Whether a value may be ignored.

    Args:
        ignored: the field's entry in an ``IgnoredFields``.
    """
    if value is None:
        return True
    if isinstance(ignored, type):
        return type(value) is ignored
    # True equals 1, but is no number
    return any(type(value) is type(other) and value == other for other in ignored)


def describe_ignored(ignored: IgnoredFields) -> Callable[[dict[str, Any]], None]:
    """A function that adds these fields to the JSON schema of a body, and forbids all others."""

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
