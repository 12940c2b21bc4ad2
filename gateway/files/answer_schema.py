"""Schemas of files for the API's description."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.files.records import FOR_BATCH

UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [FOR_BATCH]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}


class FileAnswer(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: Annotated[int, Field(ge=0)]
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FilesAnswer(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFileAnswer(BaseModel):
    """A file that is forgotten now."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]
