"""Schemas of answers for the API's description; the code writes them by itself."""

from typing import Any, Literal

from pydantic import BaseModel


class MessageAnswer(BaseModel):
    """A message of the assistant; Anthropic's documentation has its blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountAnswer(BaseModel):
    """Number of tokens of a prompt."""

    input_tokens: int


class _Error(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """What went wrong, in Anthropic's format."""

    type: Literal["error"]
    error: _Error
    request_id: str
