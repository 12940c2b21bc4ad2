"""Schemas of responses for the API's description; the code writes them by itself."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseAnswer(BaseModel):
    """A response; OpenAI's documentation has the rest of its fields."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    store: bool
    usage: dict[str, Any] | None


class DeletedAnswer(BaseModel):
    """A response that is forgotten now."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemsAnswer(BaseModel):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
