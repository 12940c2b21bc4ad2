"""Arguments that models write as text, as JSON."""

import json
from collections.abc import Set
from typing import Any, NoReturn


def json_of(text: str, is_text: bool) -> str:
    """An argument's value as JSON.

    Args:
        is_text: its parameter is of type string; any other value is JSON if it can be read so.
    """
    return quoted(text) if is_text or not _is_json(text) else text.strip()


def json_of_arguments(arguments: Any, strings: Set[str], are_texts: bool) -> str:
    """All arguments of a call as JSON.

    Args:
        strings: names of the parameters of type string.
        are_texts: values come as text, whatever their type.
    """
    if isinstance(arguments, str):
        return arguments
    if not are_texts or not isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    items = [
        f"{quoted(str(key))}: "
        + (
            json_of(value, key in strings)
            if isinstance(value, str)
            else json.dumps(value, ensure_ascii=False)
        )
        for key, value in arguments.items()
    ]
    return "{" + ", ".join(items) + "}"


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
