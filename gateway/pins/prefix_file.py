"""Reads the file of prefixes that the operator pins in the KV cache.

Each line is a JSON map with one of

    {"prompt": "text"}           tokenized like the prompt of a completion
    {"messages": [...]}          a conversation's beginning, in the model's chat template
    {"tokens": [1, 2, 3]}

and, optionally, ``cache_salt``, a ``name`` for logs, and the ``model`` that the prefix is for; by
default it is for each model. Empty lines are skipped.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.http.errors import ApiError, from_validation, shown
from gateway.openai.requests.messages import ChatMessage, check_message
from gateway.openai.requests.sampling_fields import TokenIds
from gateway.openai.requests.schema import MAX_SALT_CHARS
from gateway.pins.pin_requests import Prefix
from gateway.prompts.control_tokens import TemplateRefused
from gateway.prompts.conversations import conversation
from gateway.prompts.template_options import TemplateOptions
from gateway.text.tokenizer import Tokenizer
from shared.errors import SettingsError

_MAX_NAME_CHARS = 100
_MAX_PREFIXES = 1_000
_KINDS = ("prompt", "messages", "tokens")


class _Message(ChatMessage):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    tokens: Annotated[TokenIds, Field(min_length=1)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS)] | None = None
    model: str | None = None


def read_prefixes(file: str | None, tokenizer: Tokenizer, model: str) -> list[Prefix]:
    """The prefixes of a file for a model, tokenized; none if there is no file.

    Args:
        model: its name.

    Raises:
        SettingsError: the file cannot be read; names the line, the field and its value.
    """
    if file is None:
        return []
    prefixes: list[Prefix] = []
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
        for number, text in enumerate(lines, start=1):
            if text.strip():
                try:
                    line = _parse(text)
                    if line.model in (None, model):
                        prefixes.append(_prefix(line, number, tokenizer))
                except (ValueError, RecursionError, ApiError, TemplateRefused) as error:
                    raise ValueError(f"line {number}: {error}") from None
        if len(prefixes) > _MAX_PREFIXES:
            raise ValueError(f"{len(prefixes)} prefixes; at most {_MAX_PREFIXES} can be pinned")
    except (OSError, ValueError) as error:
        raise SettingsError("--pinned-prefixes", file, str(error)) from None
    return prefixes


def _prefix(line: _Line, number: int, tokenizer: Tokenizer) -> Prefix:
    tokens = _tokens(line, tokenizer)
    if not tokens:
        raise ValueError("no token comes of it")
    return Prefix(line.name or f"line {number}", np.array(tokens, np.int32), line.cache_salt)


def _parse(text: str) -> _Line:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON map, got {shown(data)}")
    try:
        line = _Line.model_validate(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)[0]) from None
    for index, message in enumerate(line.messages or ()):
        check_message(message, f"messages[{index}].")
    given = [kind for kind in _KINDS if getattr(line, kind) is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are" if given else "none is"
        raise ValueError(f"one of {', '.join(_KINDS)} is needed; {found} given")
    return line


def _tokens(line: _Line, tokenizer: Tokenizer) -> list[int]:
    if line.tokens is not None:
        return line.tokens
    if line.prompt is not None:
        return tokenizer.encode(line.prompt)
    assert line.messages is not None, "one of the three is given"
    if not tokenizer.has_chat_template:
        raise ValueError("messages: this model has no chat template")
    chat = tokenizer.render_with_control_tokens(
        conversation(line.messages, options=TemplateOptions(add_generation_prompt=False))
    )
    return tokenizer.encode_chat(chat)
