"""Schemas of batches for the API's description."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class BatchAnswer(BaseModel):
    """A batch; OpenAI's documentation has the rest of its fields."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]
    errors: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchesAnswer(BaseModel):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
