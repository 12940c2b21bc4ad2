"""Schema of the body of POST /v1/responses."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from gateway.http.errors import from_validation, invalid, invalid_value
from gateway.http.malformed_json import not_json
from gateway.openai.requests.body import Body, Part, check_metadata, refuse_extra
from gateway.openai.requests.ignored_fields import IgnoredFields, describe_ignored
from gateway.openai.requests.messages import MAX_NAME_CHARS
from gateway.openai.requests.sampling_fields import sampling_field
from gateway.openai.requests.schema import MAX_DEADLINE_MS, MAX_LOGPROBS, MAX_SALT_CHARS, MAX_TOOLS
from gateway.responses.request.input_items import Input
from shared.sampling import PARAMETERS

LOGPROBS = "message.output_text.logprobs"

IGNORED: IgnoredFields = {
    "user": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": ("auto", "default"),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "moderation": (),
    "context_management": ([],),
}


class FunctionTool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class NamedTool(Part):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as word")]
    | Annotated[NamedTool, Tag("as tool")],
    Discriminator(lambda value: "as tool" if isinstance(value, dict | NamedTool) else "as word"),
]


class TextFormat(Part):
    """What the text of the answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers follow the schema in any case.")


class TextOptions(Part):
    """``text`` of a body."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Part):
    """``reasoning`` of a body."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Given to the chat template."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted: reasoning is shown as it is, and not summarized."
    )


class StreamOptions(Part):
    """``stream_options`` of a body."""

    include_obfuscation: Literal[False] | None = None


class _Response(Body):
    model: str
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None


if TYPE_CHECKING:

    class _SamplingFields(_Response):
        pass

else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=_Response,
        **{name: sampling_field(parameter) for name, parameter in PARAMETERS.items()},
    )


class ResponseBody(_SamplingFields):
    """POST /v1/responses; sampling parameters as in ``PARAMETERS``."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED))

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description="The response is kept; by default it is.")
    background: bool | None = Field(
        None, description="It is finished whether a client waits for it or not."
    )
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        Field(None, description="Reasoning is never encrypted: it is shown as it is.")
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None

    @property
    def is_kept(self) -> bool:
        """Clients can ask for the response by its id."""
        return self.store is not False


def parse_response_body(data: bytes) -> ResponseBody:
    """Parses and validates a body.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    try:
        body = ResponseBody.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise not_json(data, first["msg"]) from None
        raise from_validation(first) from None
    refuse_extra(body, "", IGNORED)
    if body.background and not body.is_kept:
        raise invalid_value("background", True, "needs store: a client asks for it by its id")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options: only allowed when stream is true")
    _check_format(body)
    check_metadata(body.metadata or {})
    return body


def _check_format(body: ResponseBody) -> None:
    given = None if body.text is None else body.text.format
    if given is None:
        return
    if given.type == "json_schema" and given.schema_ is None:
        raise invalid("text.format.schema", 'text.format.schema: required for type "json_schema"')
    if given.type != "json_schema" and given.schema_ is not None:
        reason = 'text.format.schema: only allowed when type is "json_schema"'
        raise invalid("text.format.schema", reason)
