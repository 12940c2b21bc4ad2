"""Explains why a body is not JSON: compressed data, or Python."""

import json
import re
import secrets
from typing import Any

from gateway.http.errors import ApiError, invalid, unsupported_encoding

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_LOOKED_AT_BYTES = 64 * 2**10
_IN_JSON = {"None": "null", "True": "true", "False": "false"}
# Strings are matched to be skipped; one that does not end is the whole rest.
_STRING_OR_WORD = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|$)|\b(None|True|False)\b', re.DOTALL)
_SINGLE_QUOTED = re.compile(r"\s*[\[{]\s*'")


def not_json(data: bytes, reason: str) -> ApiError:
    """The error for a body that cannot be parsed.

    Args:
        reason: the parser's message.
    """
    for magic, name in _MAGIC.items():
        if data.startswith(magic):
            return unsupported_encoding(name)
    text = data[:_LOOKED_AT_BYTES].decode(errors="replace")
    found = next((match for match in _STRING_OR_WORD.finditer(text) if match[1]), None)
    if found is not None:
        path = _path_of(text, found) if len(data) <= _LOOKED_AT_BYTES else None
        where = "" if path is None else f"{path}="
        what = f"{where}{found[1]}: this looks like Python; JSON has {_IN_JSON[found[1]]}"
        return invalid(path, f"The body is not valid JSON: {what}", "invalid_json")
    if _SINGLE_QUOTED.match(text):
        reason = "this looks like Python; strings of JSON stand in double quotes"
    return invalid(None, f"The body is not valid JSON: {reason}", "invalid_json")


def _path_of(text: str, word: "re.Match[str]") -> str | None:
    """Path of the field that contains a word, if the rest of the body is JSON."""
    mark = secrets.token_hex(16)

    def mend(match: "re.Match[str]") -> str:
        if match.start() == word.start():
            return f'"{mark}"'
        return _IN_JSON[match[1]] if match[1] else match[0]

    try:
        path = _find(json.loads(_STRING_OR_WORD.sub(mend, text)), mark)
    except (ValueError, RecursionError):
        return None
    return path.removeprefix(".") if path else None


def _find(value: Any, mark: str) -> str | None:
    if value == mark:
        return ""
    items = value.items() if isinstance(value, dict) else ()
    named = [(f".{key}", item) for key, item in items]
    if isinstance(value, list):
        named = [(f"[{index}]", item) for index, item in enumerate(value)]
    for name, item in named:
        rest = _find(item, mark)
        if rest is not None:
            return name + rest
    return None
