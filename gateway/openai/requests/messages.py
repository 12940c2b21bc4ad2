"""Schemas of conversations: messages, their parts, tools and calls of tools."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from gateway.http.errors import MISSING_FIELD, invalid, invalid_value
from gateway.openai.requests.body import Body, Part, refuse_extra
from gateway.openai.requests.ignored_fields import IGNORED_IN_MESSAGE, describe_ignored

MAX_PARTS = 1_000  # of one message
MAX_TOOL_CALLS = 1_000  # of one message
MAX_NAME_CHARS = 256  # of a tool


class TextPart(Part):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[
        list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("as parts")
    ],
    Discriminator(lambda value: "as parts" if isinstance(value, list) else "as text"),
]


class CalledFunction(Part):
    """The function that an assistant called."""

    name: str
    arguments: str  # JSON, as the model wrote it
    parsed_arguments: dict[str, Any] | None = Field(
        None, description="Accepted, without effect on the answer."
    )


class ToolCall(Part):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in the stream from which it was taken


class ToolFunction(Part):
    """The function of a tool that the chat template describes to the model."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema
    strict: bool | None = None


class ChatTool(Part):
    """A tool that the chat template describes to the model."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Part):
    """The function of the tool that the model must call."""

    name: str


class NamedTool(Part):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as word")]
    | Annotated[NamedTool, Tag("as tool")],
    Discriminator(lambda value: "as tool" if isinstance(value, dict | NamedTool) else "as word"),
]


class ChatMessage(Body):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED_IN_MESSAGE))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="null only of an assistant.")
    name: str | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)] | None
    ) = Field(None, description="Of an assistant alone.")
    tool_call_id: str | None = Field(None, description="Of a tool's message alone.")
    reasoning_content: str | None = Field(None, description="Of an assistant alone.")
    reasoning: str | None = Field(None, description="The same as reasoning_content.")


def check_message(message: ChatMessage, path: str) -> None:
    """Refuse fields that a message of its role cannot have.

    Raises:
        ApiError: 400 that names the field.
    """
    refuse_extra(message, path, IGNORED_IN_MESSAGE)
    is_given = "content" in message.model_fields_set
    may_lack = message.role == "assistant" and (is_given or message.tool_calls)
    if message.content is None and not may_lack:
        name = f"{path}content"
        if not is_given:
            raise invalid(name, f"{name}: this field is required", MISSING_FIELD)
        raise invalid_value(name, None, "only an assistant's message may have none")
    if message.tool_calls and message.role != "assistant":
        reason = "only an assistant's message has any"
        raise invalid_value(f"{path}tool_calls", message.tool_calls, reason)
    for field in ("reasoning_content", "reasoning"):
        if getattr(message, field) is not None and message.role != "assistant":
            reason = "only an assistant's message has it"
            raise invalid_value(f"{path}{field}", getattr(message, field), reason)
    if message.tool_call_id is not None and message.role != "tool":
        reason = "only a tool's message has one"
        raise invalid_value(f"{path}tool_call_id", message.tool_call_id, reason)


def check_tools(tools: Sequence[ChatTool], choice: "ToolChoice | None") -> None:
    """Refuse tools of the same name, and the choice of a tool that is not there.

    Raises:
        ApiError: 400 that names the field.
    """
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        earlier = first.setdefault(tool.function.name, index)
        if earlier != index:
            reason = f"tools[{earlier}] has the same name"
            raise invalid_value(f"tools[{index}].function.name", tool.function.name, reason)
    if isinstance(choice, NamedTool):
        if choice.function.name not in first:
            reason = "no tool in tools has this name"
            raise invalid_value("tool_choice.function.name", choice.function.name, reason)
    elif choice == "required" and not tools:
        raise invalid_value("tool_choice", choice, "needs tools")
