"""Schemas of the bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from gateway.anthropic.blocks import Content, Text
from gateway.http.errors import from_validation, invalid_value
from gateway.http.malformed_json import not_json
from gateway.openai.requests.body import Body, Part, refuse_extra
from gateway.openai.requests.ignored_fields import IgnoredFields, describe_ignored
from gateway.openai.requests.messages import MAX_NAME_CHARS
from gateway.openai.requests.schema import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOOLS

IGNORED: IgnoredFields = {
    "metadata": dict,
    "service_tier": ("auto", "standard_only"),
    "cache_control": dict,
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "inference_geo": str,
    "speed": ("standard",),
    "diagnostics": (),
}
IGNORED_IN_TOOL: IgnoredFields = {
    "cache_control": dict,
    "eager_input_streaming": bool,
    "defer_loading": (False,),
    "input_examples": ([],),
    "allowed_callers": (["direct"],),
}


class Message(Part):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: Content


class Tool(Body):
    """A tool that the model may call."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED_IN_TOOL))

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Part):
    """Whether, and which, tools the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Part):
    """Whether the model reasons, given to the chat template as ``enable_thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Without effect: max_tokens bounds reasoning and answer together."
    )
    display: str | None = None


class OutputFormat(Part):
    """What the answer looks like."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """``output_config`` of a body."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="Given to the chat template; without effect if that has no variable for it.",
    )


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED))

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Text | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


_Number = Annotated[float, Field(allow_inf_nan=False)]


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[_Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True, max_length=MAX_STOPS),
        ]
        | None
    ) = None
    stream: bool | None = None


_B = TypeVar("_B", bound=CountBody)


def parse_messages_body(cls: type[_B], data: bytes) -> _B:
    """Parses and validates a body.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    try:
        body = cls.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise not_json(data, first["msg"]) from None
        raise from_validation(first) from None
    refuse_extra(body, "", IGNORED)
    for index, tool in enumerate(body.tools or ()):
        refuse_extra(tool, f"tools[{index}].", IGNORED_IN_TOOL)
    choice = body.tool_choice
    if choice is not None and (choice.name is not None) != (choice.type == "tool"):
        reason = 'given if, and only if, type is "tool"'
        raise invalid_value("tool_choice.name", choice.name, reason)
    return body
