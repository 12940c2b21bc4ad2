"""The body of POST /v1/batches, and the lines of its file."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.files.store import LONGEST_WINDOW_S
from gateway.http.errors import from_validation, invalid_value
from gateway.http.malformed_json import not_json
from gateway.openai.requests.body import Body, Part, check_metadata, refuse_extra

MOST_ID_CHARS = 512
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SHORTEST_S, _LONGEST_S = 3_600, 2_592_000  # as OpenAI has them
_B = TypeVar("_B", bound=BaseModel)


class ExpiresAfter(Part):
    """When the files of a batch expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_SHORTEST_S, le=_LONGEST_S)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Field(max_length=7)] = Field(
        description="The time after which the batch expires, such as 24h, 30m or 7d."
    )
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the files of answers expire, if not after --batch-retention."
    )

    @property
    def window_s(self) -> int:
        """Seconds after which the batch expires.

        Raises:
            ApiError: 400.
        """
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None:
            reason = "expected a time such as 24h, 30m or 7d"
            raise invalid_value("completion_window", self.completion_window, reason)
        window_s = int(found[1]) * _UNIT_S[found[2]]
        if window_s > LONGEST_WINDOW_S:
            raise invalid_value("completion_window", self.completion_window, "at most 7d")
        return window_s


class BatchLine(BaseModel):
    """A line of the file of a batch."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MOST_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The model that the body names, as far as it names one."""
        name = self.body.get("model")
        return name if isinstance(name, str) else ""


def parse_batch_body(data: bytes) -> BatchBody:
    """Parses and validates the body of a call.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    body = _parse(BatchBody, data)
    refuse_extra(body, "", {})
    check_metadata(body.metadata or {})
    return body


def parse_line(data: bytes) -> BatchLine:
    """Parses and validates a line, but for the body in it.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    return _parse(BatchLine, data)


def _parse(cls: type[_B], data: bytes) -> _B:
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise not_json(data, first["msg"]) from None
        raise from_validation(first) from None
