"""Bases of the schemas of request bodies: strict types, and no unknown fields."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from gateway.http.errors import invalid_value, unsupported
from gateway.openai.requests.ignored_fields import REASONS, IgnoredFields, may_be_ignored

_MAX_METADATA = 16
_MAX_METADATA_CHARS = 512


class Body(BaseModel):
    """A body, or a part of it that may have fields which are ignored."""

    # Extra fields are kept for `refuse_extra`, which accepts those that may be ignored.
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        hide_input_in_errors=True,
        json_schema_extra={"additionalProperties": False},
    )


class Part(BaseModel):
    """A part of a body in which no field is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse more metadata than a kept object may have.

    Raises:
        ApiError: 400.
    """
    if len(metadata) > _MAX_METADATA:
        raise invalid_value("metadata", metadata, f"at most {_MAX_METADATA} entries")
    for name, value in metadata.items():
        if max(len(name), len(value)) > _MAX_METADATA_CHARS:
            reason = f"keys and values have at most {_MAX_METADATA_CHARS} characters"
            raise invalid_value("metadata", metadata, reason)


def refuse_extra(body: Body, path: str, ignored: IgnoredFields) -> None:
    """Refuse fields that a body of this class does not have, unless their values may be ignored.

    Args:
        path: of the body in the request, with a dot at its end; "" for the whole body.

    Raises:
        ApiError: 400 that names the field.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in ignored or not may_be_ignored(value, ignored[name]):
            raise unsupported(path + name[:80], value, REASONS.get(name, ""))
